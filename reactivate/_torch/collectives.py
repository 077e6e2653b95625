"""Collectives: how many of a group were issued, those that run while the program goes on, and handles of others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from reactivate._torch.modes import run_unseen
from reactivate._torch.modules import is_distributed_run
from reactivate._torch.ways import fastest, find, is_missing

_FakeWork = fastest(
    "the handle of a collective that is done",
    "torch._C._distributed_c10d.FakeWork",
    probe=lambda kind: bool(kind().wait()) and kind().boxed() is not None,
    lost="plans of models that are sharded already: plan first, shard later",
)
_ProcessGroup, _world, _work_of = fastest(
    "the numbers of the collectives of all groups, and handles of those that are left out",
    "torch._C._distributed_c10d.ProcessGroup",
    "torch.distributed.distributed_c10d._world",
    "torch._C._distributed_c10d._create_work_from_future",
    probe=lambda kind, world, work_of: (
        all(map(callable, (kind.unbox, kind._get_sequence_number_for_group, work_of)))
        and isinstance(world.pg_map, dict)
    ),
    lost="`guard_memory` on several ranks",
)
_number_in_flight: Callable[[], int] = fastest(
    "the number of functional collectives that nobody has waited for",
    "torch._C._distributed_c10d._get_work_registry_size",
    probe=lambda count: type(count()) is int,
    public=is_distributed_run,
)
Work = find("torch._C._distributed_c10d.Work")
_IN_STREAM_ORDER = frozenset({"nccl", "xccl", "hccl"})
"""Backends that the calling thread enqueues: no thread of theirs writes to a tensor."""


def finished_work() -> Any:
    """Return a handle that says that its collective is done, as ops return it."""
    return _FakeWork().boxed()


def finished_work_with(tensors: list[Any]) -> Any:
    """Return one that hands over results, which those who reduce gradients ask it for."""
    future: torch.futures.Future[list[Any]] = torch.futures.Future()
    future.set_result(tensors)
    return _work_of(future).boxed()


def issued() -> dict[str, int]:
    """Return how many collectives this process has issued in each of its groups, by the groups' names."""
    return {group.group_name: number for group in _world.pg_map if (number := _number_of(group)) is not None}


def _number_of(group: Any) -> int | None:
    try:
        return int(group._get_sequence_number_for_group())
    except RuntimeError:  # of a backend that does not count
        return None


def group_name_of(op: Any, args: Any, kwargs: Any) -> str | None:
    """Return the name of the group that an op talks to; None if it talks to none."""
    for index, argument in enumerate(op._schema.arguments):
        if argument.name in ("process_group", "group_name"):
            group = args[index] if index < len(args) else kwargs[argument.name]
            if isinstance(group, str):
                return group
            return str((_ProcessGroup.unbox(group) if argument.name == "process_group" else group).group_name)
    return None


def arrived(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the tensors, when the functional collectives that fill them are done, where a thread of a backend does that.

    It moves their versions, by chance sooner or later on each rank. Nothing waits where a device's stream fills them.
    """
    if _number_in_flight():
        for tensor in tensors:
            if type(tensor) in (Tensor, Parameter) and _is_filled_by_threads(tensor.device.type):
                run_unseen(_wait_for, tensor)
    return tensors


@torch.no_grad()
def _wait_for(tensor: Tensor) -> None:
    torch.ops._c10d_functional.wait_tensor(tensor.detach())


def _is_filled_by_threads(device_type: str) -> bool:
    """Return whether the backend of any process group fills tensors on such a device by threads, as gloo does."""
    world = find("torch.distributed.distributed_c10d._world")
    if device_type == "cpu" or is_missing(world):
        return True
    pairs = [pair.partition(":") for config in world.pg_backend_config.values() for pair in str(config).split(",")]
    return any(device == device_type and backend not in _IN_STREAM_ORDER for device, _, backend in pairs)

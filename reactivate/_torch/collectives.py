"""Collectives: how many of a group were issued, which group an op talks to, and handles of some that are done."""

from __future__ import annotations

from typing import Any

import torch

from reactivate._torch.ways import fastest

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

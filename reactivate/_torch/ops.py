"""Ops, what their schemas say and the containers that they take; and collectives, counted, waited for and watched."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.nn import Parameter
from torch.utils import _pytree

from reactivate._torch.modes import run_unseen
from reactivate._torch.modules import is_distributed_run
from reactivate._torch.private_api import Replaced, find, is_missing, resolve_private

# Functions that `torch.nn.functional` re-exports, and the ops of `torch.ops`.
builtin_functions: Any = getattr(torch._C, "_nn", None)
OpOverload, OpOverloadPacket = find("torch._ops.OpOverload"), find("torch._ops.OpOverloadPacket")
HigherOrderOperator = find("torch._ops.HigherOrderOperator")
# The op that asks a tensor for its device: fake tensors are asked it several times an op, through every dispatch mode.
DEVICE_QUERY: Any = torch.ops.prim.device.default


def qualified_name(packet: Any) -> str:
    """`library::op`."""
    return packet._qualified_op_name


def _arguments(op: Any) -> Any:
    return op._schema.arguments if isinstance(op, OpOverload) else ()


@functools.cache
def written_arguments(op: Any) -> tuple[tuple[int, str, bool], ...]:
    """List the arguments that `op`'s schema says it writes to: (position, name, whether it can only be named, as `out=`)."""
    return tuple(
        (position, item.name, item.kwarg_only)
        for position, item in enumerate(_arguments(op))
        if item.alias_info is not None and item.alias_info.is_write
    )


def written_values(op: Any, args: Any, kwargs: dict[str, Any]) -> list[Any]:
    """List what a call of `op` writes to: tensors, lists of these, and None for an argument that is not given."""
    return [args[place] if place < len(args) else kwargs.get(name) for place, name, _ in written_arguments(op)]


@functools.cache
def tensor_positions(op: Any) -> tuple[int, ...]:
    """List the positions of the arguments that `op`'s schema says are tensors: torch takes numbers there, too."""
    return tuple(position for position, item in enumerate(_arguments(op)) if str(item.type) == "Tensor")


@functools.cache
def opaque_arguments(op: Any) -> frozenset[int | str]:
    """Return the positions and names of arguments whose size kernels alone know: the workspaces of recurrent layers.

    It follows from the other arguments, and a fake tensor in its place is empty.
    """
    names = [item.name for item in _arguments(op)]
    return frozenset(key for pair in enumerate(names) if pair[1] in ("workspace", "reserve") for key in pair)


@functools.cache
def returns_arguments(op: Any) -> bool:
    """Return whether `op`'s schema says that it returns an argument of its, or a view of one."""
    returns = op._schema.returns if isinstance(op, OpOverload) else ()
    return any(item.alias_info is not None for item in returns)


# -- containers of tensors, those of libraries too --------------------------------------------------------------------

# Container types that a library registered with torch: {type: (flatten_fn, unflatten_fn, ...)}.
registered_containers: dict[type, Any] = _pytree.SUPPORTED_NODES


def leaves_with_paths(value: Any) -> list[tuple[str, Any]]:
    """List what is in nested containers, with the way to it: "[0]['hidden']"."""
    return [(_pytree.keystr(path), leaf) for path, leaf in _pytree.tree_leaves_with_path(value)]


def flatten(value: Any) -> tuple[list[Any], Any]:
    """Return what is in nested containers, and what `unflatten` needs to put it back."""
    return ([value], None) if isinstance(value, Tensor) else _pytree.tree_flatten(value)


def unflatten(leaves: list[Any], structure: Any) -> Any:
    """The opposite of `flatten`."""
    return leaves[0] if structure is None else _pytree.tree_unflatten(leaves, structure)


def leaves_at_op(value: Any) -> list[Any]:
    """List what an op takes or returns, which lies in lists, tuples and dicts alone: `flatten` takes ten times as long."""
    found: list[Any] = []
    _collect(value, found)
    return found


def tensors_at_op(value: Any) -> list[Tensor]:
    """List the tensors that an op takes or returns."""
    return [leaf for leaf in leaves_at_op(value) if isinstance(leaf, Tensor)]


def _collect(value: Any, found: list[Any]) -> None:
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (tuple, list)):
        value = (value,)
    for item in value:
        if isinstance(item, (tuple, list, dict)):
            _collect(item, found)
        elif item is not None:
            found.append(item)


def tensors_in(args: Any, kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors among the arguments of a call, also those in lists, tuples and dicts."""
    found: list[Tensor] = []
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += tensors_in(value, {})
        elif isinstance(value, dict):
            found += tensors_in(value.values(), {})
        elif hasattr(value, "__dataclass_fields__") and hasattr(value, "__dict__"):
            found += tensors_in(vars(value).values(), {})
    return found


# -- collectives ------------------------------------------------------------------------------------------------------

_FakeWork = resolve_private(
    "the handle of a collective that is done",
    "torch._C._distributed_c10d.FakeWork",
    lost="plans of models that are sharded already: plan first, shard later",
)
_ProcessGroup, _world, _work_of = resolve_private(
    "the numbers of the collectives of all groups, and handles of those that are left out",
    "torch._C._distributed_c10d.ProcessGroup",
    "torch.distributed.distributed_c10d._world",
    "torch._C._distributed_c10d._create_work_from_future",
    lost="`retry_on_oom` on several ranks",
)
_number_in_flight: Callable[[], int] = resolve_private(
    "the number of functional collectives that were not waited for",
    "torch._C._distributed_c10d._get_work_registry_size",
    probe=lambda count: type(count()) is int,
    public=is_distributed_run,
)
_FakeStore = resolve_private(
    "a process group whose other ranks are not there",
    "torch.testing._internal.distributed.fake_pg.FakeStore",
    probe=lambda kind: kind() is not None,
    lost="`reactivate plan --world`",
)
Work = find("torch._C._distributed_c10d.Work")
_IN_STREAM_ORDER = frozenset({"nccl", "xccl", "hccl"})
"""Backends that the calling thread enqueues: no thread of theirs writes to a tensor."""


@contextmanager
def alone_among(count: int) -> Iterator[None]:
    """Be the first rank of so many, the others of which are not there: collectives return at once."""
    torch.distributed.init_process_group("fake", store=_FakeStore(), rank=0, world_size=count)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


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


def ranks_of(group_name: str) -> list[int]:
    """Return the ranks of a process group; those of all processes where this torch does not show its groups."""
    groups = () if is_missing(_world) else _world.pg_map
    found = next((group for group in groups if group.group_name == group_name), None)
    return list(torch.distributed.get_process_group_ranks(found))


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
    if device_type == "cpu" or is_missing(_world):
        return True
    pairs = [pair.partition(":") for config in _world.pg_backend_config.values() for pair in str(config).split(",")]
    return any(device == device_type and backend not in _IN_STREAM_ORDER for device, _, backend in pairs)


_called, _called_overload = resolve_private(
    "observing calls of ops",
    "torch.ops.aten.sin._op",
    "torch.ops.aten.sin.default._op",
    lost="the detection of collectives in place that are called as ops, on what a saved call has returned",
)
# All of these write to their first argument, or to `out`.
_METHODS = (
    *("allreduce", "allreduce_coalesced", "broadcast", "reduce", "recv", "recv_anysource", "scatter", "gather"),
    *("allgather", "_allgather_base", "allgather_coalesced", "allgather_into_tensor_coalesced"),
    *("all_gather_single", "all_gather_single_coalesced"),
    *("reduce_scatter", "_reduce_scatter_base", "reduce_scatter_tensor_coalesced"),
    *("reduce_scatter_single", "reduce_scatter_single_coalesced", "alltoall", "alltoall_base", "all_to_all_single"),
)
_OPS = (
    *("allreduce_", "allreduce_coalesced_", "broadcast_", "reduce_", "recv_", "recv_any_source_", "scatter_"),
    *("gather_", "allgather_", "_allgather_base_", "allgather_coalesced_", "allgather_into_tensor_coalesced_"),
    *("reduce_scatter_", "_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_", "alltoall_", "alltoall_base_"),
)
_FUNCTIONAL_OPS = (
    *("all_reduce_", "all_reduce_coalesced_", "broadcast_"),
    *("all_gather_into_tensor_out", "reduce_scatter_tensor_out"),
)


def collective_writes(tell: Callable[[Any], None]) -> Replaced:
    """Return what tells, while it is begun, of tensors that collectives in place are about to write to.

    No version counter moves then. The methods of process groups, which `torch.distributed` calls, and the ops in
    `torch.ops` are wrapped.

    Args:
        tell: called with a tensor, or lists of them.
    """

    def told(function: Callable[..., Any], is_method: bool) -> Callable[..., Any]:
        def telling(*args: Any, **kwargs: Any) -> Any:
            given = (*args[is_method:], *kwargs.values())
            tell(kwargs.get("out", given[:1]))
            return function(*args, **kwargs)

        return telling

    return Replaced(
        lambda: [(owner, name, told(getattr(owner, name), isinstance(owner, type))) for owner, name in _writing()]
    )


def _writing() -> Iterator[tuple[Any, str]]:
    """Yield (owner, name) of the functions that this torch has."""
    if not torch.distributed.is_available():
        return
    group = torch.distributed.ProcessGroup
    yield from ((group, name) for name in _METHODS if name in vars(group))
    if is_missing(_called) or is_missing(_called_overload):
        return
    for namespace, names in ((torch.ops.c10d, _OPS), (torch.ops._c10d_functional, _FUNCTIONAL_OPS)):
        for packet in filter(None, (getattr(namespace, name, None) for name in names)):
            yield packet, "_op"
            yield from ((getattr(packet, name), "_op") for name in packet.overloads())


class StorageResizes(Replaced):
    """Tells of storages that programs have resized: libraries that shard parameters let go of their memory so.

    Args:
        tell: called with a storage afterwards.
    """

    def __init__(self, tell: Callable[[torch.UntypedStorage], None]) -> None:
        resize = torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            tell(storage)
            return result

        super().__init__(lambda: [(torch.UntypedStorage, "resize_", resized)])


def is_view(func: Any) -> bool:
    """Return whether an op looks at no element."""
    return bool(func.is_view or func.overloadpacket.__name__ == "detach")


def call_counted(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
    """Call an op from a dispatch mode, with the versions that it moves without one.

    Torch's in-place foreach ops move the versions of their tensors, but not while a dispatch mode is on: a write that is seen
    in one pass would be unseen in the other.
    """
    name = func.overloadpacket.__name__
    if not (name.startswith("_foreach") and name.endswith("_")):
        return func(*args, **(kwargs or {}))
    before = [(tensor, tensor._version) for tensor in args[0] if not tensor.is_inference()]
    result = func(*args, **(kwargs or {}))
    increment_version([tensor for tensor, version in before if tensor._version == version])
    return result

"""Collectives in place: they write to tensors of the caller's, and no version counter moves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from threading import RLock
from typing import Any

import torch

from reactivate._torch.ways import fastest, is_missing

_called, _called_overload = fastest(
    "observing calls of ops",
    "torch.ops.aten.sin._op",
    "torch.ops.aten.sin.default._op",
    probe=lambda called, overload: callable(called) and callable(overload),
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


class CollectiveWrites:
    """Tells of tensors that collectives in place are about to write to.

    Meanwhile the methods of process groups, which `torch.distributed` calls, and the ops in `torch.ops` are wrapped.

    Args:
        tell: called with a tensor, or lists of them.
    """

    def __init__(self, tell: Callable[[Any], None]) -> None:
        self._tell = tell
        self._changing = RLock()
        self._users = 0
        self._replaced: list[tuple[Any, str, Any, Any]] = []  # (owner, name, what is there, what was there)

    def begin(self) -> None:
        """Tell from now on."""
        with self._changing:
            self._users += 1
            if self._users == 1:
                for owner, name in _writing():
                    placed = self._told(getattr(owner, name), is_method=isinstance(owner, type))
                    self._replaced.append((owner, name, placed, vars(owner)[name]))
                    setattr(owner, name, placed)

    def end(self) -> None:
        """End what one `begin` began."""
        with self._changing:
            self._users -= 1
            while self._replaced and not self._users:
                owner, name, placed, original = self._replaced.pop()
                if vars(owner).get(name) is placed:
                    setattr(owner, name, original)

    def _told(self, function: Callable[..., Any], *, is_method: bool) -> Callable[..., Any]:
        def told(*args: Any, **kwargs: Any) -> Any:
            given = (*args[is_method:], *kwargs.values())
            self._tell(kwargs.get("out", given[:1]))
            return function(*args, **kwargs)

        return told


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

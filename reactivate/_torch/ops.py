"""Ops, and what their schemas say."""

from __future__ import annotations

import functools
from typing import Any

import torch

from reactivate._torch.ways import find

# Functions that `torch.nn.functional` re-exports, and the ops of `torch.ops`.
builtin_functions: Any = getattr(torch._C, "_nn", None)
OpOverload, OpOverloadPacket = find("torch._ops.OpOverload"), find("torch._ops.OpOverloadPacket")
HigherOrderOperator = find("torch._ops.HigherOrderOperator")

# The op that asks a tensor for its device: fake tensors are asked it several times an op, through every dispatch mode.
DEVICE_QUERY: Any = torch.ops.prim.device.default


def qualified_name(packet: Any) -> str:
    """`library::op`."""
    return packet._qualified_op_name  # type: ignore[no-any-return]


@functools.cache
def written_arguments(op: Any) -> tuple[tuple[int, str, bool], ...]:
    """List the arguments that `op`'s schema says it writes to: (position, name, whether it can only be named, as `out=`)."""
    arguments = op._schema.arguments if isinstance(op, OpOverload) else ()
    return tuple(
        (position, item.name, item.kwarg_only)
        for position, item in enumerate(arguments)
        if item.alias_info is not None and item.alias_info.is_write
    )


def written_values(op: Any, args: Any, kwargs: dict[str, Any]) -> list[Any]:
    """List what a call of `op` writes to: tensors, lists of these, and None for an argument that is not given."""
    return [args[place] if place < len(args) else kwargs.get(name) for place, name, _ in written_arguments(op)]


@functools.cache
def tensor_positions(op: Any) -> tuple[int, ...]:
    """List the positions of the arguments that `op`'s schema says are tensors: torch takes numbers there, too."""
    arguments = op._schema.arguments if isinstance(op, OpOverload) else ()
    return tuple(position for position, item in enumerate(arguments) if str(item.type) == "Tensor")


@functools.cache
def opaque_arguments(op: Any) -> frozenset[int | str]:
    """Return the positions and names of arguments whose size kernels alone know: the workspaces of recurrent layers.

    It follows from the other arguments, and a fake tensor in its place is empty.
    """
    arguments = op._schema.arguments if isinstance(op, OpOverload) else ()
    found = {position: item.name for position, item in enumerate(arguments) if item.name in ("workspace", "reserve")}
    return frozenset([*found, *found.values()])


@functools.cache
def returns_arguments(op: Any) -> bool:
    """Return whether `op`'s schema says that it returns an argument of its, or a view of one."""
    returns = op._schema.returns if isinstance(op, OpOverload) else ()
    return any(item.alias_info is not None for item in returns)

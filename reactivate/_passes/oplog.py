"""`check="every"`: the ops of both passes, with a checksum of every result.

A dispatch mode writes them down in the forward pass and compares in the recomputation, so the first op that differs is named
as it runs. It costs a checksum an op and, on an accelerator, a synchronisation an op: a tool for finding a fault.

A device that records ops (XLA) runs each of them by itself, in both passes: how a compiler rounds depends on what else is in
the program. Its tensors are copied to the host for their checksums.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch
from torch import Tag, Tensor

from reactivate._passes.logs import unseen
from reactivate._passes.places import CodeLocation, line_of, user_frame_inside
from reactivate._torch.dynamo import DispatchMode
from reactivate._torch.modes import (
    STAND_INS,
    dispatch_modes,
    is_dispatch_mode_active,
    is_tracing,
    leave_dispatch_modes,
    run_unseen,
)
from reactivate._torch.ops import call_counted, is_view, leaves_at_op, written_arguments
from reactivate._xla.fence import fences

# Their results are whatever was in memory. `copy.deepcopy` of a tensor calls `set_` before it copies.
_UNINITIALIZED = frozenset(
    {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided", "resize_", "set_"}
)
# Which of their results is a workspace, or a table, that is not written to everywhere.
_WORKSPACES = {"mkldnn_rnn_layer": 3, "_cudnn_rnn": 3, "miopen_rnn": 3, "_ctc_loss": 1}
_AROUND = 4  # ops to print before and after the one that differs


class LoggedOp:
    """One op that ran: its name, what came out, where it was called.

    Attributes:
        users: the innermost line of the user's inside of the region; None if it is all torch's code.
        inner: the instruction that calls it, often one of torch's.
        around: the innermost line of the user's, which may be around the region.
    """

    __slots__ = ("around", "inner", "name", "results", "users")

    def __init__(self, name: str, results: tuple[Any, ...], frame: FrameType) -> None:
        self.name = name
        self.results = results
        found, is_inside = user_frame_inside(frame)
        self.around: CodeLocation = found.f_code, found.f_lasti
        self.users = self.around if is_inside else None
        self.inner: CodeLocation = frame.f_code, frame.f_lasti

    def is_like(self, other: LoggedOp) -> bool:
        """Return whether the same op had the same results."""
        return self.name == other.name and self.results == other.results

    def text(self, site: CodeLocation) -> str:
        """The op with the line of `site`."""
        results = ", ".join(f"{dtype} {list(shape)} #{checksum:016x}" for shape, dtype, checksum in self.results)
        return f"{self.name} -> {results or 'nothing'}   at {line_of(site)}"


class OpLog(DispatchMode):
    """Writes down every op under it, and calls `check` with all of them after each.

    Attributes:
        may_omit: whether the function has asked `is_recomputing()`, so that its recomputation may leave ops out.
    """

    may_omit = False
    is_of_users_ops = True  # what a region does beside them is no op of its function

    def __init__(self, check: Callable[[list[LoggedOp]], None] | None = None) -> None:
        super().__init__()
        self.ops: list[LoggedOp] = []
        self._check = check
        self._is_paused = False
        self._is_traced = is_tracing()  # the region itself is

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, with its ops written down."""

        def logged(*args: Any, **kwargs: Any) -> Any:
            with self:
                return function(*args, **kwargs)

        return logged

    def leave(self) -> None:
        """End the context, if it is open."""
        while any(mode is self for mode in dispatch_modes()):
            leave_dispatch_modes(is_dispatch_mode_active() - 1)

    def unseen(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, without its ops written down: they are not the user's."""

        def unlogged(*args: Any, **kwargs: Any) -> Any:
            was_paused, self._is_paused = self._is_paused, True
            try:
                return function(*args, **kwargs)
            finally:
                self._is_paused = was_paused

        return unlogged

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._is_paused or (is_tracing() and not self._is_traced):  # what is traced inside of the region is not run
            return call_counted(func, args, kwargs)
        _run_recorded((args, kwargs))  # otherwise they would be in the op's program
        result = call_counted(func, args, kwargs)
        if not _is_left_out(func, args):
            results = _results_unseen(result, func)
            # What computes no tensor and writes to none is a question, to a nested tensor say, and may be asked in one pass.
            if results or written_arguments(func):
                self.ops.append(LoggedOp(str(func), results, _caller()))
                if self._check is not None:
                    self._check(self.ops)
        return result


def _caller() -> FrameType:
    """Return the frame that made an op: ours in a backward inside of the region, which may be the first on its thread.

    No frame has itself in a variable: only the collector would end it.
    """
    return sys._getframe(1).f_back or sys._getframe(1)


def _run_recorded(value: Any) -> None:
    """Run what devices have recorded for the tensors among the arguments of an op."""
    for kind, fence in fences().items():
        run = getattr(fence, "run", None)
        if run is not None:
            tensors = [item for item in leaves_at_op(value) if isinstance(item, Tensor) and item.device.type == kind]
            recorded = [item for item in tensors if not isinstance(item, STAND_INS)]
            if recorded:
                run_unseen(run, recorded)


def _is_left_out(func: Any, args: tuple[Any, ...]) -> bool:
    """Return whether an op is in one pass only, for reasons that the user's code has no part in."""
    # A device that copies views (XLA) copies them again once what they are views of was written to.
    if Tag.view_copy in func.tags:
        return True
    # Autocast casts a parameter once and keeps the copy; a recomputation, which does not read that, casts it again.
    return func is torch.ops.aten._to_copy.default and args[0].requires_grad and args[0].is_leaf


def difference(forward: list[LoggedOp], recomputation: list[LoggedOp]) -> str:
    """The last op of `recomputation`, which differs from the forward's, and the ops of both passes around it."""
    index = len(recomputation) - 1
    first, last = max(0, index - _AROUND), index + _AROUND + 1
    lines = [f"Op {index + 1} is the first that differs."]
    sites = {"forward": [op.around for op in forward], "recomputation": list(_sites_of(recomputation, forward))}
    for title, ops in (("forward", forward), ("recomputation", recomputation)):
        lines.append(f"{title}:")
        for number in range(first, min(last, len(ops))):
            op = ops[number].text(sites[title][number])
            lines.append(f"  {'->' if number == index else '  '} {number + 1:4} {op}")
    return "\n".join(lines)


def _sites_of(recomputation: list[LoggedOp], forward: list[LoggedOp]) -> Iterator[CodeLocation]:
    """Yield the lines of the ops of a recomputation: the user's line around it, of the backward, says nothing of them."""
    for number, op in enumerate(recomputation):
        if op.users is not None:
            yield op.users
        elif number < len(forward) and forward[number].name == op.name:
            yield forward[number].around
        else:
            yield op.inner


def _results_unseen(result: Any, func: Any) -> tuple[Any, ...]:
    """Take the checksums of results, unseen by a log around this one, which would take checksums of the checksum's ops."""
    name = func.overloadpacket.__name__
    found: tuple[Any, ...] = unseen(tuple, _results(result, name, is_view(func) or name in _UNINITIALIZED))
    return found


def _results(result: Any, op: str, has_no_values: bool) -> Iterator[tuple[torch.Size, torch.dtype, int]]:
    # Of a view none are compared: it may be written to before it is read, as a parameter is that is clamped.
    if isinstance(result, Tensor):
        yield result.shape, result.dtype, 0 if has_no_values else checksum(result)
    elif isinstance(result, (tuple, list)):
        for index, item in enumerate(result):
            yield from _results(item, op, has_no_values or index == _WORKSPACES.get(op))


def checksum(tensor: Tensor) -> int:
    """A number for the bits of `tensor`: 64 bits, exact integer arithmetic, the same on every run of one device.

    Unlike `_bits.checksum` it is computed of tensors inside of transforms of torch's, too.
    """
    dense = tensor.detach()
    if dense.layout is not torch.strided or dense.device.type == "meta" or type(dense) is not Tensor:
        return 0  # only its shape and dtype are compared
    if hasattr(fences().get(dense.device.type), "run"):
        dense = dense.cpu()  # under a dispatch mode, torch_xla ends the process in `view(torch.uint8)`
    if dense.is_quantized:
        dense = dense.int_repr()  # `view` of a quantized tensor ends the process
    plain = dense.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    data = plain.reshape(-1).view(torch.uint8).to(torch.int64)
    if data.numel() == 0:
        return 0
    place = torch.arange(1, data.numel() + 1, dtype=torch.int64, device=data.device)
    mixed = (data + 0x9E37) * (place * 0x2545F4914F6CDD1D)  # wraps around, which is what a hash wants
    return int((mixed ^ (mixed >> 29)).sum().item()) & 0xFFFFFFFFFFFFFFFF

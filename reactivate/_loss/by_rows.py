"""Cross-entropy of logits over slices of their rows: bitwise that of torch.

`F.cross_entropy` keeps the log-softmax of all logits for the backward, and makes two more tensors of that size there: the
gradient of the log-softmax, and that of its input. A row of any of them depends on the same row of the logits alone. So
here the log-softmax is computed for some rows at a time, in both passes. The logits are kept for that, and their gradient
is the only other tensor of their size.

The losses of the rows are added up by the kernel that torch adds them up with, in its order: `F.nll_loss` of a single
column. What depends on another order, class weights and label smoothing, is left to torch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional

from reactivate._loss.slices import slices_of, without_autocast
from reactivate._torch.autograd import is_taken

SLICES = 16
_IGNORED = -100


class Uses:
    """The number of readers of a cast of logits: gradients of several are added before they are cast back.

    Attributes:
        count: of cross-entropies, and of tensors made of the cast or of a view of it.
    """

    count = 0


def cross_entropy_by_rows(
    logits: Tensor,
    dtype: torch.dtype,
    targets: Tensor,
    ignore_index: int,
    reduction: str,
    cast: tuple[Tensor, Uses] | None = None,
) -> Tensor:
    """Return `F.cross_entropy(logits.to(dtype), targets, ...)`, bit for bit.

    Args:
        logits: [rows, classes].
        dtype: that the loss is computed in.
        targets: [rows], classes.
        ignore_index: of rows that do not count.
        reduction: "mean", "sum" or "none".
        cast: what stands for `logits.to(dtype)` in the graph, and its uses, where others may read it as well.
    """
    stand, uses = cast or (None, Uses())
    uses.count += 1
    losses = _RowLosses.apply(logits, stand, uses, targets, dtype, ignore_index)
    if reduction == "none":
        return losses  # type: ignore[no-any-return]
    column = torch.where(targets == ignore_index, _IGNORED, 0)
    return functional.nll_loss(-losses.unsqueeze(1), column, ignore_index=_IGNORED, reduction=reduction)


def _losses_of(logits: Tensor, targets: Tensor, dtype: torch.dtype, ignore_index: int) -> Tensor:
    return functional.cross_entropy(logits.to(dtype), targets, ignore_index=ignore_index, reduction="none")


class _RowLosses(Function):
    """The loss of each row."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        stand: Tensor | None,
        uses: Uses,
        targets: Tensor,
        dtype: torch.dtype,
        ignore_index: int,
    ) -> Tensor:
        ctx.save_for_backward(logits, targets)
        ctx.ignore_index, ctx.uses, ctx.cast_dtype = ignore_index, uses, None if stand is None else dtype
        slices = slices_of(len(logits), SLICES)
        losses = torch.cat([_losses_of(logits[rows], targets[rows], dtype, ignore_index) for rows in slices])
        ctx.dtype = losses.dtype  # autocast may have chosen another one
        return losses

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        logits, targets = ctx.saved_tensors
        # Others add their gradients to that of the cast, or it is what is asked for.
        is_of_cast = ctx.cast_dtype is not None and (ctx.uses.count > 1 or not is_taken(ctx.next_functions[0][0]))
        with without_autocast(logits):
            found = _RowLosses._gradient(ctx, logits.to(ctx.cast_dtype) if is_of_cast else logits, targets, *gradients)
        return (None, found, *[None] * 4) if is_of_cast else (found, *[None] * 5)

    @staticmethod
    def _gradient(ctx: Any, logits: Tensor, targets: Tensor, gradient: Tensor) -> Tensor:
        if torch.is_grad_enabled():  # a graph of the gradient is asked for: of one op
            losses = _losses_of(logits, targets, ctx.dtype, ctx.ignore_index)
            return torch.autograd.grad(losses, logits, gradient, create_graph=True)[0]
        found = torch.empty_like(logits)
        for rows in slices_of(len(logits), SLICES):
            found[rows] = _gradient_of(logits[rows], targets[rows], ctx.dtype, ctx.ignore_index, gradient[rows])
        return found


def _gradient_of(logits: Tensor, targets: Tensor, dtype: torch.dtype, ignore_index: int, gradient: Tensor) -> Tensor:
    leaf = logits.detach().requires_grad_()
    with torch.enable_grad():
        losses = _losses_of(leaf, targets, dtype, ignore_index)
    return torch.autograd.grad(losses, leaf, gradient)[0]

"""Cross-entropy of a linear head over slices of the tokens: the logits of one slice at a time.

When the backward begins, the logits are there with their log-softmax and their gradients, whatever was recomputed. Only
slices help: head and loss of some tokens, forward and again backward, before those of the next ones. (The method is known:
https://arxiv.org/abs/2410.10989, https://arxiv.org/abs/2411.09009.)

A product of matrices with fewer rows may round otherwise, and the gradient of the weight is a sum over all tokens, here of
partial sums. So the results are those of the plain head up to rounding, not bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional

from reactivate._loss.slices import slices_of, without_autocast
from reactivate._text.keywords import refuse_unknown
from reactivate._text.words import described
from reactivate._torch.dynamo import leave_out_of_graphs
from reactivate.errors import UsageError

Reduction = Literal["mean", "sum", "none"]


@dataclass(frozen=True)
class TokenLoss:
    """The loss of a token, from its logits.

    Attributes:
        ignore_index: the target of tokens that do not count.
        label_smoothing: as for `F.cross_entropy`.
        softcap: logits become `softcap * tanh(logits / softcap)` first; None for logits as they are.
        z_loss: how much of the squared logarithm of the softmax's denominator is added.
    """

    ignore_index: int = -100
    label_smoothing: float = 0.0
    softcap: float | None = None
    z_loss: float = 0.0

    def of(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of each token, computed in float32 at least.

        Args:
            logits: [tokens, classes].
            targets: [tokens].
        """
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        losses = functional.cross_entropy(
            logits,
            targets,
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
            reduction="none",
        )
        if self.z_loss:
            squares = logits.logsumexp(1).square()
            losses = losses + self.z_loss * squares.masked_fill(targets == self.ignore_index, 0.0)
        return losses


@refuse_unknown
def chunked_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    chunks: int = 8,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: Reduction = "mean",
    softcap: float | None = None,
    z_loss: float = 0.0,
) -> Tensor:
    """Compute `F.cross_entropy(F.linear(hidden, weight, bias), targets)` with the logits of one slice of tokens at a time.

    The loss and the gradients are those of that line up to rounding: sums over tokens are sums of the slices' sums. The
    backward computes the logits again. Logits of fewer than 32 bits become float32 before the softmax. `torch.compile`
    leaves the call out of its graphs.

    Args:
        hidden: [..., features], what the head is called with.
        weight: [classes, features], of the head.
        targets: [...], the class of each token; not shifted.
        bias: [classes], of the head.
        chunks: how many slices at most: each has a multiple of 16 tokens.
        ignore_index: the target of tokens that do not count, for "mean" neither.
        label_smoothing: as for `F.cross_entropy`.
        reduction: "mean" over the tokens that count, "sum", or "none" for the loss of each token, of the shape of `targets`.
        softcap: caps the logits: `softcap * tanh(logits / softcap)`.
        z_loss: the weight of `logsumexp(logits) ** 2`, which is added to the loss of each token that counts.

    Raises:
        UsageError: an argument is not one of the above, or shapes do not fit.

    Examples:
        >>> import torch, reactivate
        >>> head = torch.nn.Linear(16, 1000)
        >>> hidden, targets = torch.randn(2, 64, 16, requires_grad=True), torch.randint(1000, (2, 64))
        >>> loss = reactivate.loss.chunked_cross_entropy(hidden, head.weight, targets, bias=head.bias, chunks=4)
        >>> loss.backward()
    """
    _check(hidden, weight, bias, targets)
    if not isinstance(chunks, int) or isinstance(chunks, bool) or chunks < 1:
        raise UsageError(f"chunked_cross_entropy: chunks= takes a whole number of at least 1; got {described(chunks)}.")
    numbers = {"label_smoothing": label_smoothing, "softcap": softcap, "z_loss": z_loss, "ignore_index": ignore_index}
    for name, value in numbers.items():
        if not isinstance(value, Real) and not (value is None and name == "softcap"):
            raise UsageError(f"chunked_cross_entropy: {name}= takes a number; got {described(value)}.")
    if reduction not in ("mean", "sum", "none"):
        raise UsageError(f'chunked_cross_entropy: reduction= takes "mean", "sum" or "none"; got {reduction!r}.')
    loss = TokenLoss(ignore_index, label_smoothing, softcap, z_loss)
    losses = _losses_of_tokens(hidden, weight, bias, targets, loss, chunks)
    if reduction == "none":
        return losses.view(targets.shape)
    total = losses.sum()
    return total if reduction == "sum" else total / (targets != ignore_index).sum()


def _losses_of_tokens(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, loss: TokenLoss, chunks: int
) -> Tensor:
    rows = hidden.reshape(-1, hidden.shape[-1])
    return _ChunkedLosses.apply(rows, weight, bias, targets.reshape(-1), loss, chunks)  # type: ignore[no-any-return]


leave_out_of_graphs(_losses_of_tokens, "the logits of a slice are computed again in the backward")


def _check(hidden: Any, weight: Any, bias: Any, targets: Any) -> None:
    for name, value in (("hidden", hidden), ("weight", weight), ("targets", targets)):
        if not isinstance(value, Tensor):
            raise UsageError(f"chunked_cross_entropy: {name} takes a tensor; got {described(value)}.")
    if weight.ndim != 2 or hidden.ndim < 1 or hidden.shape[-1] != weight.shape[1]:
        raise UsageError(
            "chunked_cross_entropy takes hidden of shape [..., features] and weight of shape [classes, features]; got "
            f"{tuple(hidden.shape)} and {tuple(weight.shape)}."
        )
    if bias is not None and (not isinstance(bias, Tensor) or bias.shape != weight.shape[:1]):
        raise UsageError(
            f"chunked_cross_entropy: bias= takes a tensor of shape {tuple(weight.shape[:1])}; got {described(bias)}."
        )
    if targets.shape != hidden.shape[:-1]:
        raise UsageError(
            f"chunked_cross_entropy takes a target for each token, of shape {tuple(hidden.shape[:-1])}; got "
            f"{tuple(targets.shape)}. If tokens predict the next one, write hidden[:, :-1] and targets[:, 1:]."
        )


class _ChunkedLosses(Function):
    """The loss of each token."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, loss: TokenLoss, chunks: int
    ) -> Tensor:
        ctx.save_for_backward(hidden, weight, bias, targets)
        ctx.loss, ctx.slices = loss, slices_of(len(hidden), chunks)
        kind = hidden.device.type
        is_cast = torch.is_autocast_enabled(kind) and hidden.dtype is not torch.float64  # which autocast leaves alone
        ctx.dtype = torch.get_autocast_dtype(kind) if is_cast else hidden.dtype
        with without_autocast(hidden):
            head = _Head.of(weight, bias, ctx.dtype)
            return torch.cat([loss.of(head.logits_of(hidden[rows]), targets[rows]) for rows in ctx.slices])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        hidden, weight, bias, targets = ctx.saved_tensors
        with without_autocast(hidden):
            if torch.is_grad_enabled():  # a graph of the gradients is asked for: of the whole
                losses = ctx.loss.of(_Head.of(weight, bias, ctx.dtype).logits_of(hidden), targets)
                return *_differentiable(losses, (hidden, weight, bias), gradients[0]), None, None, None
            found = _HeadGradients(ctx.needs_input_grad, hidden, weight, bias)
            head = _Head.of(weight, bias, ctx.dtype)
            for rows in ctx.slices:
                logits = head.logits_of(hidden[rows]).requires_grad_()
                with torch.enable_grad():
                    losses = ctx.loss.of(logits, targets[rows])
                (gradient,) = torch.autograd.grad(losses, logits, gradients[0][rows])
                found.add(rows, gradient, hidden[rows].to(ctx.dtype), head)
                del logits, losses, gradient  # before the next slice has its own
        return found.hidden, found.weight, found.bias, None, None, None


@dataclass(frozen=True)
class _Head:
    """The head in the dtype that its product is computed in."""

    weight: Tensor
    bias: Tensor | None

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> _Head:
        return cls(weight.to(dtype), None if bias is None else bias.to(dtype))

    def logits_of(self, hidden: Tensor) -> Tensor:
        return functional.linear(hidden.to(self.weight.dtype), self.weight, self.bias)


class _HeadGradients:
    """The gradients, slice by slice."""

    def __init__(self, needed: tuple[bool, ...], hidden: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        self.hidden = torch.empty_like(hidden) if needed[0] else None
        self.weight = torch.zeros_like(weight) if needed[1] else None
        self.bias = torch.zeros_like(bias) if bias is not None and needed[2] else None

    def add(self, rows: slice, gradient: Tensor, hidden: Tensor, head: _Head) -> None:
        """Add a slice, with the gradient of its logits and what the head was called with for it."""
        if self.hidden is not None:
            self.hidden[rows] = gradient @ head.weight
        if self.weight is not None:
            if self.weight.dtype == gradient.dtype:
                self.weight.addmm_(gradient.T, hidden)  # in place: no second tensor of the weight's size
            else:
                self.weight += gradient.T @ hidden
        if self.bias is not None:
            self.bias += gradient.sum(0)


def _differentiable(losses: Tensor, inputs: tuple[Tensor | None, ...], gradient: Tensor) -> list[Tensor | None]:
    wanted = [item for item in inputs if item is not None and item.requires_grad]
    found = iter(torch.autograd.grad(losses, wanted, gradient, create_graph=True))
    return [next(found) if item is not None and item.requires_grad else None for item in inputs]

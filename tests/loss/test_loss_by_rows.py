"""Cross-entropy by rows: bitwise that of torch, in less memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from memory import allocated_by
from oracle import assert_bitwise
from several import each
from torch import Tensor
from torch.nn import functional as F

from reactivate._loss.by_rows import cross_entropy_by_rows

CASES = [
    (rows, classes, kind, dtype)
    for rows, classes in ((0, 5), (1, 3), (64, 1000), (257, 333), (130, 5003))
    for kind, dtype in (
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.float64, torch.float64),
    )
]


def made(rows: int, classes: int, kind: torch.dtype) -> tuple[Tensor, Tensor]:
    torch.manual_seed(rows)
    logits = (3 * torch.randn(rows, classes)).to(kind).requires_grad_()
    targets = torch.randint(classes, (rows,))
    targets[::5] = -100
    return logits, targets


def plain(logits: Tensor, dtype: torch.dtype, targets: Tensor, ignore_index: int, reduction: str) -> Tensor:
    return F.cross_entropy(logits.to(dtype), targets, ignore_index=ignore_index, reduction=reduction)


def both(logits: Tensor, *args: Any) -> list[Tensor]:
    return [function(logits, *args) for function in (plain, cross_entropy_by_rows)]


def assert_same(logits: Tensor, *args: Any) -> None:
    losses = both(logits, *args)
    assert_bitwise(*losses, "loss")
    torch.manual_seed(1)
    factor = 3.7 * torch.randn_like(losses[0])
    assert_bitwise(*(torch.autograd.grad(loss, logits, factor)[0] for loss in losses), "gradient")


@each(("rows", "classes", "kind", "dtype"), CASES, ids=str)
@each("reduction", ["mean", "sum", "none"])
def test_every_bit_is_that_of_torch(
    rows: int, classes: int, kind: torch.dtype, dtype: torch.dtype, reduction: str
) -> None:
    logits, targets = made(rows, classes, kind)
    assert_same(logits, dtype, targets, -100, reduction)


@pytest.mark.parametrize("ignore_index", [0, 7, -100])
def test_any_target_can_be_the_one_that_does_not_count(ignore_index: int) -> None:
    logits, targets = made(257, 10, torch.float32)
    targets[targets == -100] = ignore_index
    for reduction in ("mean", "sum", "none"):
        assert_same(logits, torch.float32, targets, ignore_index, reduction)


def test_rows_that_lie_apart_are_read_where_they_lie() -> None:
    logits, targets = made(130, 50, torch.float32)
    wide = torch.cat([logits.detach(), logits.detach()], 1).requires_grad_()
    one, other = both(wide[:, :50], torch.float32, targets, -100, "mean")
    assert_bitwise(one, other, "loss")
    assert_bitwise(*(torch.autograd.grad(loss, wide)[0] for loss in (one, other)), "gradient")


def test_under_autocast_it_has_the_dtypes_of_torch() -> None:
    logits, targets = made(130, 50, torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        one, other = both(logits, torch.bfloat16, targets, -100, "mean")
    assert one.dtype == other.dtype
    assert_bitwise(one, other, "loss")
    assert_bitwise(*(torch.autograd.grad(loss, logits)[0] for loss in (one, other)), "gradient")


def test_the_gradient_can_be_differentiated() -> None:
    logits, targets = made(130, 50, torch.float64)
    found = []
    for loss in both(logits, torch.float64, targets, -100, "mean"):
        (gradient,) = torch.autograd.grad(loss, logits, create_graph=True)
        found.append(torch.autograd.grad(gradient.square().sum(), logits)[0])
    assert_bitwise(*found, "second gradient")


def test_a_target_that_is_no_class_is_refused_as_by_torch() -> None:
    logits, targets = made(130, 50, torch.float32)
    targets[3] = 50
    with pytest.raises(IndexError):
        cross_entropy_by_rows(logits, torch.float32, targets, -100, "mean")


@pytest.mark.parametrize(("kind", "least", "most"), [(torch.float32, 12, 5), (torch.bfloat16, 12, 3)], ids=str)
def test_it_takes_little_beside_logits_and_gradient(kind: torch.dtype, least: int, most: int) -> None:
    logits, targets = made(512, 4000, kind)
    peaks = []
    for function in (plain, cross_entropy_by_rows):

        def step() -> None:
            torch.autograd.grad(function(logits, torch.float32, targets, -100, "mean"), logits)

        step()
        peaks.append(allocated_by(step).peak_bytes / logits.numel())
    assert peaks[0] >= least and peaks[1] <= most  # bytes for each logit, beside the logits themselves


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA: not run")
@pytest.mark.parametrize("classes", [7, 1000, 1025, 32000, 50257, 128256])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16], ids=str)
def test_every_bit_is_that_of_torch_on_cuda(classes: int, kind: torch.dtype) -> None:
    """Kernels read several numbers at once: rows begin where they begin in the whole, also of an odd number of classes."""
    logits, targets = made(1000, classes, kind)
    logits, targets = logits.detach().cuda().requires_grad_(), targets.cuda()
    for dtype in {kind, torch.float32}:
        for reduction in ("mean", "sum", "none"):
            assert_same(logits, dtype, targets, -100, reduction)

"""`chunked_cross_entropy`: the values of the plain head and loss up to rounding, the memory of one slice.

The sums over tokens are made of the slices' sums, so values are compared with `allclose`, in float64, where another order of
a sum shows in the last digits only and a wrong term does not.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from memory import allocated_by
from oracle import assert_bitwise
from several import each
from torch import Tensor
from torch.nn import functional as F

import reactivate
from reactivate.errors import UsageError

TOKENS, CLASSES, FEATURES = 100, 37, 12


def made(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    hidden, weight = torch.randn(TOKENS, FEATURES, dtype=dtype), torch.randn(CLASSES, FEATURES, dtype=dtype)
    targets = torch.randint(CLASSES, (TOKENS,))
    targets[::7] = -100
    return hidden.requires_grad_(), weight.requires_grad_(), torch.randn(CLASSES, dtype=dtype).requires_grad_(), targets


def plain(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    softcap: float | None = None,
    z_loss: float = 0.0,
    reduction: str = "mean",
    **options: Any,
) -> Tensor:
    logits = F.linear(hidden, weight, bias)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    loss = F.cross_entropy(logits, targets, reduction=reduction, **options)
    if not z_loss:
        return loss
    counts = targets != options.get("ignore_index", -100)
    squares = torch.where(counts, logits.logsumexp(-1) ** 2, 0.0)
    if reduction == "none":
        return loss + z_loss * squares
    return loss + z_loss * squares.sum() / (counts.sum() if reduction == "mean" else 1)


OPTIONS = {
    "plain": {},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "smoothing": {"label_smoothing": 0.1},
    "softcap": {"softcap": 3.0},
    "z": {"z_loss": 0.01},
    "z, sum": {"z_loss": 0.01, "reduction": "sum"},
    "ignore": {"ignore_index": 5},
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("has_bias", [False, True])
def test_it_has_the_loss_and_the_gradients_of_the_plain_head(name: str, has_bias: bool) -> None:
    hidden, weight, bias, targets = made()
    if name == "ignore":
        targets[targets == -100] = 5
    leaves = (hidden, weight, bias) if has_bias else (hidden, weight)
    options = {**OPTIONS[name], "bias": bias if has_bias else None}
    for chunks in (1, 3, 100):
        found = [f(hidden, weight, targets, **options) for f in (plain, chunked(chunks))]
        assert found[0].shape == found[1].shape
        torch.testing.assert_close(found[1], found[0])  # another order of the sum: see above
        factor = torch.randn_like(found[0])
        for one, other in zip(*(torch.autograd.grad(loss, leaves, factor) for loss in found)):
            torch.testing.assert_close(other, one)


def chunked(chunks: int) -> Any:
    return lambda *args, **kwargs: reactivate.loss.chunked_cross_entropy(*args, chunks=chunks, **kwargs)


def test_a_mean_over_no_token_is_not_a_number_as_in_torch() -> None:
    hidden, weight, _, targets = made()
    assert reactivate.loss.chunked_cross_entropy(hidden, weight, torch.full_like(targets, -100)).isnan()
    assert reactivate.loss.chunked_cross_entropy(hidden[:0], weight, targets[:0], reduction="sum") == 0


def test_batches_of_sequences_are_tokens() -> None:
    hidden, weight, _, targets = made()
    flat = reactivate.loss.chunked_cross_entropy(hidden, weight, targets, chunks=3, reduction="none")
    rows = reactivate.loss.chunked_cross_entropy(
        hidden.view(4, 25, -1), weight, targets.view(4, 25), chunks=3, reduction="none"
    )
    assert rows.shape == (4, 25)
    assert_bitwise(flat, rows.flatten(), "losses")


def test_no_more_than_one_slice_of_the_logits_is_there() -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(1024, 16, requires_grad=True), torch.randn(2048, 16, requires_grad=True)
    targets = torch.randint(2048, (1024,))
    logits = 1024 * 2048 * 4

    def peak(loss_of: Any) -> int:
        def step() -> None:
            loss_of(hidden, weight, targets).backward()

        step()
        return allocated_by(step).peak_bytes

    assert peak(plain) >= 3 * logits
    gradients = 2 * (
        hidden.nbytes + weight.nbytes
    )  # those that are made, beside those that are there, and small change
    for chunks in (4, 16):
        assert peak(chunked(chunks)) <= 4 * logits // chunks + gradients
    assert peak(chunked(16)) < peak(chunked(4)) / 3


def test_a_frozen_weight_gets_no_gradient_and_takes_no_memory_for_it() -> None:
    hidden, weight, _, targets = made()
    loss = reactivate.loss.chunked_cross_entropy(hidden, weight.detach(), targets, chunks=4)
    (found,) = torch.autograd.grad(loss, hidden)
    torch.testing.assert_close(found, torch.autograd.grad(plain(hidden, weight, targets), hidden)[0])


def test_under_autocast_the_product_has_its_dtype_and_the_softmax_float32() -> None:
    hidden, weight, bias, targets = made(torch.float32)
    seen = set(dtypes_of_products(hidden, weight, bias, targets))
    assert seen == {torch.bfloat16}
    with torch.autocast("cpu", torch.bfloat16):
        whole = F.cross_entropy(F.linear(hidden, weight, bias).float(), targets)
        loss = reactivate.loss.chunked_cross_entropy(hidden, weight, targets, bias=bias, chunks=3)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, whole)  # the same losses of tokens, added up in another order
    for one, other in zip(*(torch.autograd.grad(item, (hidden, weight, bias)) for item in (whole, loss))):
        assert other.dtype == torch.float32
        torch.testing.assert_close(other, one, rtol=0.02, atol=1e-3)  # sums of slices are rounded to bfloat16


def test_autocast_leaves_float64_alone() -> None:
    hidden, weight, bias, targets = made(torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        whole = F.cross_entropy(F.linear(hidden, weight, bias), targets)
        loss = reactivate.loss.chunked_cross_entropy(hidden, weight, targets, bias=bias, chunks=3)
    assert loss.dtype == whole.dtype == torch.float64
    torch.testing.assert_close(loss, whole)  # the same losses of tokens, added up in another order


def dtypes_of_products(hidden: Tensor, weight: Tensor, bias: Tensor, targets: Tensor) -> Iterator[torch.dtype]:
    from torch.utils._python_dispatch import TorchDispatchMode

    found = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if "mm" in str(func):
                found.append(args[1].dtype)
            return result

    with Watch(), torch.autocast("cpu", torch.bfloat16):
        reactivate.loss.chunked_cross_entropy(hidden, weight, targets, bias=bias)
    yield from found


def test_the_gradient_can_be_differentiated() -> None:
    hidden, weight, _, targets = made()

    def penalty(loss_of: Any) -> Tensor:
        (gradient,) = torch.autograd.grad(loss_of(hidden, weight, targets), hidden, create_graph=True)
        return torch.autograd.grad(gradient.square().sum(), weight)[0]

    torch.testing.assert_close(penalty(chunked(4)), penalty(plain))


def test_it_can_stand_in_a_region_and_in_a_compiled_function() -> None:
    hidden, weight, _, targets = made()
    loss_of = chunked(4)
    one = torch.autograd.grad(loss_of(hidden, weight, targets), (hidden, weight))
    region = reactivate.checkpoint(lambda hidden: loss_of(hidden * 1.0, weight, targets))
    for first, other in zip(one, torch.autograd.grad(region(hidden), (hidden, weight))):
        assert_bitwise(first, other, "in a region")
    compiled = torch.compile(lambda hidden: loss_of(hidden, weight, targets) * 1.0, backend="eager")
    for first, other in zip(one, torch.autograd.grad(compiled(hidden), (hidden, weight))):
        assert_bitwise(first, other, "compiled")


REFUSED = {
    "a number": (lambda h, w, t: ((h, w, 3), {}), "targets takes a tensor"),
    "features": (lambda h, w, t: ((h[:, 1:], w, t), {}), r"\(100, 11\) and \(37, 12\)"),
    "targets": (lambda h, w, t: ((h, w, t[1:]), {}), "a target for each token"),
    "bias": (lambda h, w, t: ((h, w, t), {"bias": h}), "bias= takes a tensor of shape"),
    "chunks": (lambda h, w, t: ((h, w, t), {"chunks": 0}), "chunks= takes a whole number"),
    "reduction": (lambda h, w, t: ((h, w, t), {"reduction": "max"}), '"mean", "sum" or "none"'),
    "softcap": (lambda h, w, t: ((h, w, t), {"softcap": "x"}), "softcap= takes a number; got 'x'"),
    "z_loss": (lambda h, w, t: ((h, w, t), {"z_loss": None}), "z_loss= takes a number; got None"),
    "unknown": (lambda h, w, t: ((h, w, t), {"chunk": 2}), "Did you mean 'chunks'"),
}


@each("name", REFUSED)
def test_a_wrong_argument_is_refused_in_words(name: str) -> None:
    hidden, weight, _, targets = made()
    make, words = REFUSED[name]
    args, kwargs = make(hidden, weight, targets)
    with pytest.raises(UsageError, match=words):
        reactivate.loss.chunked_cross_entropy(*args, **kwargs)

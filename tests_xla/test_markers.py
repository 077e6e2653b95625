"""Step markers inside of regions: a recomputation goes past them as its forward did."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_xla
import torch_xla.core.xla_model as xm
from lazy import DEVICE, XLA, Wrap, ours, plain
from oracle import Watched
from torch import Tensor
from torch.nn import functional as F

from reactivate import policies
from reactivate._passes.observing import observed_by
from reactivate.errors import UnsupportedError


def marked(x: Tensor) -> Tensor:
    x = F.dropout(x.sin(), 0.5).exp()
    torch_xla.sync()
    return F.dropout(x, 0.5).cos()


def twice(x: Tensor) -> Tensor:
    x = F.dropout(x.sin(), 0.5).exp()
    torch_xla.sync()
    x = F.dropout(x, 0.5).cos()
    xm.mark_step(wait=True)
    return (F.dropout(x, 0.5) * torch.rand_like(x)).exp()


def without_numbers(x: Tensor) -> Tensor:
    x = x.sin().exp()
    torch_xla.sync()
    return x.cos().exp()


def first_of_all(x: Tensor) -> Tensor:
    torch_xla.sync()
    return F.dropout(x.sin(), 0.5).exp()


def at_the_end(x: Tensor) -> Tensor:
    x = F.dropout(x.sin(), 0.5).exp()
    torch_xla.sync()
    return x


def seeded_then_marked(x: Tensor) -> Tensor:
    torch_xla.manual_seed(3)
    return F.dropout(x.sin(), 0.5).exp()


def nested(x: Tensor) -> Tensor:
    return ours(marked)(F.dropout(x, 0.5)).exp()


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    function.__name__: function
    for function in (marked, twice, without_numbers, first_of_all, at_the_end, seeded_then_marked, nested)
}


def steps(function: Callable[[Tensor], Tensor], wrap: Wrap, draws_before: int = 1) -> list[Any]:
    torch.manual_seed(0)
    x = torch.randn(8, 16).to(DEVICE).requires_grad_()
    torch_xla.manual_seed(5)
    torch_xla.sync()
    found: list[Any] = []
    for _ in range(3):
        y = x
        for _ in range(draws_before):
            y = F.dropout(y, 0.1)
        y = wrap(function)(y)
        z = wrap(function)(F.dropout(y, 0.1))
        loss = F.dropout(z, 0.1).square().sum()
        (gradient,) = torch.autograd.grad(loss, x)
        found += [loss.detach(), gradient, torch.rand(4, device=DEVICE), XLA._xla_get_rng_seed("")]
        torch_xla.sync()
    return [*(item.cpu() if isinstance(item, Tensor) else item for item in found), XLA._xla_get_rng_seed("")]


def assert_equal(expected: list[Any], found: list[Any]) -> None:
    for index, (one, other) in enumerate(zip(expected, found, strict=True)):
        same = torch.equal(one, other) if isinstance(one, Tensor) else one == other
        assert same, f"item {index}: {one} against {other}"


@pytest.mark.parametrize("draws_before", [0, 3])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_marker_inside(name: str, draws_before: int) -> None:
    watched = Watched()
    expected = steps(FUNCTIONS[name], plain, draws_before)
    with observed_by(watched):
        found = steps(FUNCTIONS[name], ours, draws_before)
    assert watched.recomputations >= 6
    assert_equal(expected, found)


def test_a_marker_inside_op_by_op(op_by_op: None) -> None:
    assert_equal(steps(marked, plain), steps(marked, ours))


def test_a_saved_call_before_a_marker() -> None:
    policy = policies.save_ops("dropout")
    expected, found = steps(saved, plain), steps(saved, lambda function: ours(function, policy=policy))
    assert_equal(expected, found)


def saved(x: Tensor) -> Tensor:
    """Nothing that rounds in another way where a compiler is given other barriers."""
    for index in range(3):
        x = F.dropout(x.relu() - x * 0.5, 0.5)
        if index:
            torch_xla.sync()
    return x * x * 0.25


def test_saved_calls_op_by_op(op_by_op: None) -> None:
    policy = policies.save_ops("dropout")
    assert_equal(steps(saved, plain), steps(saved, lambda function: ours(function, policy=policy)))


def test_many_numbers_without_a_marker() -> None:
    def fn(x: Tensor) -> Tensor:
        with torch.no_grad():
            for _ in range(5000):
                torch.bernoulli(x[0, 0] * 0)
        return F.dropout(x, 0.5).exp()

    def run(wrap: Wrap) -> list[Any]:
        torch_xla.manual_seed(5)
        x = torch.ones(8, 16, device=DEVICE).requires_grad_()
        (gradient,) = torch.autograd.grad(wrap(fn)(F.dropout(x, 0.5)).sum(), x)
        torch_xla.sync()
        return [gradient.cpu(), XLA._xla_get_rng_seed("")]

    assert_equal(run(plain), run(ours))


def test_a_marker_and_a_seed_are_refused() -> None:
    def fn(x: Tensor) -> Tensor:
        x = F.dropout(x, 0.5).exp()
        torch_xla.sync()
        torch_xla.manual_seed(3)
        return F.dropout(x, 0.5).exp()

    torch_xla.manual_seed(5)
    x = torch.ones(8, 16, device=DEVICE).requires_grad_()
    with pytest.raises(UnsupportedError, match=r"xla:0 went past a step marker .* and sets a seed"):
        ours(fn)(F.dropout(x, 0.5))

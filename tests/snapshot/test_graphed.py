"""Constants that a region makes part of the graph: it writes values with a gradient into them, or asks for theirs."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracle import Watched, assert_alike, compare
from several import check_each, each
from torch import Tensor, nn

import reactivate
from reactivate._passes.observing import observed_by

Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]
HELD: dict[str, Tensor] = {}

WRITES: dict[str, Callable[[Tensor, Tensor, nn.Linear], Any]] = {
    "all of it": lambda x, constant, linear: constant.mul_(linear.weight),
    "one row": lambda x, constant, linear: constant[0].copy_(x[0]),
    "only its flag": lambda x, constant, linear: constant.requires_grad_(),
}
PLACES = (
    *("argument", "keyword", "tuple", "list", "dict", "variable", "global", "buffer", "attribute"),
    "argument and variable",
)


class Holds(nn.Module):
    def __init__(self, constant: Tensor, body: Callable[..., Any], is_buffer: bool) -> None:
        super().__init__()
        self.body = body
        if is_buffer:
            self.register_buffer("constant", constant)
        else:
            self.constant = constant

    def forward(self, x: Tensor) -> Any:
        return self.body(x, self.constant)


def call(wrap: Wrap, place: str, body: Callable[..., Any], x: Tensor, constant: Tensor) -> Any:
    HELD["it"] = constant
    inside: dict[str, Any] = {"list": [constant], "dict": {0: constant}, "tuple": (constant, (constant,))}
    if place in inside:
        return wrap(lambda x, values: body(x, values[0]))(x, inside[place])
    if place in ("buffer", "attribute"):
        return wrap(Holds(constant, body, place == "buffer"))(x)
    return {
        "argument": lambda: wrap(body)(x, constant),
        "keyword": lambda: wrap(body)(x, constant=constant),
        "variable": lambda: wrap(lambda x: body(x, constant))(x),
        "global": lambda: wrap(lambda x: body(x, HELD["it"]))(x),
        "argument and variable": lambda: wrap(lambda x, also: body(x, constant) + also.sum())(x, constant),
    }[place]()


def results(place: str, write: Any, size: int, inner: Wrap, outer: Wrap) -> list[Any]:
    """Return gradients and what the constant holds: of a backward through the region, and of one past it."""
    torch.manual_seed(1)
    linear, leaf, constant = nn.Linear(size, size), torch.randn(size, size, requires_grad=True), torch.randn(size, size)

    def body(x: Tensor, constant: Tensor) -> Tensor:
        before = constant.sin()

        def written(constant: Tensor) -> Tensor:
            write(x, constant, linear)
            return constant * 3

        after = inner(written)(constant)
        return (x.sin() * after + before).sum() + constant.cos().sum()

    out = call(outer, place, body, leaf * 2, constant)
    out.backward(retain_graph=True)
    (constant * constant).sum().backward()
    return [leaf.grad, linear.weight.grad, constant.detach(), constant.grad if constant.is_leaf else None]


@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("write", WRITES)
def test_each_recomputation_gets_it_without_a_gradient(write: str, early_stop: bool) -> None:
    def check(place: str, size: int, is_nested: bool) -> None:
        def region(fn: Any) -> Any:
            return reactivate.checkpoint(fn, early_stop=early_stop)

        inner: Wrap = region if is_nested else lambda fn: fn
        plain = results(place, WRITES[write], size, lambda fn: fn, lambda fn: fn)
        with observed_by(watched := Watched()):
            ours = results(place, WRITES[write], size, inner, region)
        assert watched.recomputations >= 1
        assert_alike(plain, ours)

    cases = itertools.product(PLACES, (4, 64), (False, True))
    check_each({f"{case}": lambda case=case: check(*case) for case in cases})


@each("written", ["values", "flag"])
def test_one_that_is_written_to_after_the_region(written: str) -> None:
    """Between its forward and its backward."""

    def step(wrap: Wrap) -> list[Any]:
        linear, constant = nn.Linear(4, 4), torch.randn(4, 4)

        def outer(scale: Tensor) -> Tensor:
            inside = constant * 2
            after = wrap(lambda inside: linear(inside.sin().sin()))(inside)
            if written == "flag":
                inside.requires_grad_()
            else:
                inside.mul_(after)
            return (after * scale).sum() + inside.sum()

        scale = torch.randn(4, 4, requires_grad=True)
        wrap(outer)(scale).backward()
        return [scale.grad, linear.weight.grad]

    compare(step)

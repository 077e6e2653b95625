"""Policies where forward-mode derivatives are computed: what a saved call keeps has no tangent, so it runs again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from several import each
from state_programs import Program, Wrap, backward, check_program
from torch import Tensor, nn
from torch.autograd import forward_ad

from reactivate import policies

STEPS, LATE = 5, 2  # the first, second and fourth call are compared
POLICIES: dict[str, Any] = {
    "linear": policies.save_ops("linear"),
    "tanh": policies.save_ops("tanh"),
    "linear_and_mul": policies.save_ops("linear", "mul"),
    "compute_intensive": policies.compute_intensive(),
}


def inside(linear: nn.Linear, x: Tensor, step: int) -> Tensor:
    """A directional derivative beside the value, as of a physics-informed network."""
    with forward_ad.dual_level():
        value, tangent = forward_ad.unpack_dual(linear(forward_ad.make_dual(x, torch.ones_like(x))).tanh())
        assert tangent is not None
    return value.sum() + tangent.square().sum()


def without_gradient(linear: nn.Linear, x: Tensor, step: int) -> Tensor:
    """A sensitivity that scales the layer, and begins in a call that is not compared."""
    h = linear(x)
    if step < LATE:
        return h.tanh() * h
    with torch.no_grad(), forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        scale = forward_ad.unpack_dual(dual * nn.functional.linear(dual, linear.weight))[1]
        assert scale is not None
    return h.tanh() * scale


@pytest.mark.parametrize("fn", [inside, without_gradient])
@each("policy", POLICIES, ids=str)
def test_a_level_inside_of_the_region(policy: str, fn: Callable[..., Tensor]) -> None:
    def train(wrap: Wrap) -> Any:
        linear, found = nn.Linear(4, 4), []
        checkpointed = wrap(lambda x, step: fn(linear, x, step), policy=POLICIES[policy])
        for step in range(STEPS):
            linear.zero_grad()
            backward(checkpointed(torch.randn(3, 4), step))
            found.append(linear.weight.grad)
        return found

    check_program(Program(train, recomputations=STEPS))


@each("policy", POLICIES, ids=str)
def test_a_level_around_the_region(policy: str) -> None:
    def train(wrap: Wrap) -> Any:
        linear, found = nn.Linear(4, 4), []
        checkpointed = wrap(lambda x: linear(x).tanh() * x, policy=POLICIES[policy])
        for _ in range(STEPS):
            linear.zero_grad()
            x = torch.randn(3, 4)
            with forward_ad.dual_level():
                value, tangent = forward_ad.unpack_dual(checkpointed(forward_ad.make_dual(x, torch.ones_like(x))))
                assert tangent is not None
                backward(value, tangent)
            found.append(linear.weight.grad)
        return found

    check_program(Program(train, recomputations=STEPS))

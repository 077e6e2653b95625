"""State that is not there yet when a region first runs, and begins later: attributes that functions get."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from state_programs import Program, Programs, Wrap, backward, check_program, curve, leaf
from torch import Tensor, nn

PROGRAMS = Programs()
STEPS, LATE = 8, 4  # the first, second and fourth call are compared; the fifth is not


@pytest.mark.parametrize("program", PROGRAMS.listed, ids=str)
def test_program(program: Program) -> None:
    check_program(program)


def counting(x: Tensor, step: int) -> Tensor:
    if step >= LATE:
        counting.calls = getattr(counting, "calls", 0) + 1  # type: ignore[attr-defined]
    return curve(x, getattr(counting, "calls", 1))


def listing(x: Tensor, step: int) -> Tensor:
    if step >= LATE:
        if not hasattr(listing, "seen"):
            listing.seen = []  # type: ignore[attr-defined]
        listing.seen.append(step)  # type: ignore[attr-defined]
    return curve(x, len(getattr(listing, "seen", "-")))


def calls_counting(x: Tensor, step: int) -> Tensor:
    return counting(x, step)


def calls_listing(x: Tensor, step: int) -> Tensor:
    return listing(x, step)


def trained(wrap: Wrap, fn: Callable[..., Tensor], function: Any) -> Any:
    vars(function).clear()
    checkpointed, found = wrap(fn), []
    for step in range(STEPS):
        x = leaf(4)
        backward(checkpointed(x, step))
        found.append(x.grad)
    return found, dict(vars(function))


@PROGRAMS.right
def first_attribute_of_the_region(wrap: Wrap) -> Any:
    return trained(wrap, counting, counting)


@PROGRAMS.right
def first_attribute_of_a_function_that_code_names(wrap: Wrap) -> Any:
    return trained(wrap, calls_counting, counting)


@PROGRAMS.right
def first_attribute_that_holds_a_list(wrap: Wrap) -> Any:
    return trained(wrap, calls_listing, listing)


@PROGRAMS.right
def rate_of_an_optimizer(wrap: Wrap) -> Any:
    linear, found = nn.Linear(4, 4), []
    optimizer = torch.optim.SGD(linear.parameters(), lr=1.0)

    def scaled(x: Tensor, step: int) -> Tensor:
        group = optimizer.param_groups[0]
        if step >= LATE:
            group["lr"] = group["lr"] + 1
        return curve(linear(x), group["lr"])

    checkpointed = wrap(scaled)
    for step in range(STEPS):
        linear.zero_grad()
        backward(checkpointed(leaf(4), step))
        found += [linear.weight.grad, optimizer.param_groups[0]["lr"]]
    return found


class Calls(nn.Module):
    def __init__(self, fn: Callable[..., Tensor]) -> None:
        super().__init__()
        self.fn, self.linear = fn, nn.Linear(4, 4)

    def forward(self, x: Tensor, step: int) -> Tensor:
        return self.fn(self.linear(x), step)


class CallsCounting(Calls):
    def forward(self, x: Tensor, step: int) -> Tensor:
        return counting(self.linear(x), step)


class CallsListing(Calls):
    def forward(self, x: Tensor, step: int) -> Tensor:
        return listing(self.linear(x), step)


@PROGRAMS.right
def first_attribute_of_a_function_that_a_module_names(wrap: Wrap) -> Any:
    return trained(wrap, CallsCounting(counting), counting)


@PROGRAMS.right
def first_attribute_that_holds_a_list_beside_a_module(wrap: Wrap) -> Any:
    return trained(wrap, CallsListing(listing), listing)


@PROGRAMS.right
def first_attribute_of_a_function_in_a_module(wrap: Wrap) -> Any:
    return trained(wrap, Calls(calls_listing), listing)

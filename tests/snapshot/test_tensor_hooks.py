"""Hooks on tensors: a recomputation has those that the forward began with, wherever the region finds the tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from state_programs import Program, Programs, Wrap, backward, check_program, leaf
from torch import Tensor, nn

PROGRAMS = Programs()
right = PROGRAMS.right
STEPS = 3  # the first two calls are compared


@pytest.mark.parametrize("program", PROGRAMS.listed, ids=str)
def test_program(program: Program) -> None:
    check_program(program)


class Shelf:
    """A storage that keeps copies."""

    def save(self, tensor: Tensor) -> Any:
        return [tensor.clone()]

    def load(self, handle: Any) -> Tensor:
        return handle[0].clone()  # type: ignore[no-any-return]


def halve(gradient: Tensor) -> Tensor:
    return gradient * 0.5


# -- hooks that come and go between the forward and the backward of a region that differentiates itself -----------------

Finder = Callable[[Tensor], tuple[Callable[..., Tensor], tuple[Any, ...]]]
"""Takes a tensor with a gradient, and returns a function that reads it and that function's arguments."""


def penalised(read: Tensor, x: Tensor) -> Tensor:
    """A function whose result depends on a gradient that the hooks on `read` change."""
    h = (x * read).sin()
    (gradient,) = torch.autograd.grad(h.sum(), read, retain_graph=True)
    return h + gradient.detach() * h


def as_an_argument(tensor: Tensor) -> Any:
    return penalised, (tensor, leaf(3, 4))


def in_a_tuple(tensor: Tensor) -> Any:
    return lambda pair, x: penalised(pair[0], x), ((tensor, 1), leaf(3, 4))


def in_a_list(tensor: Tensor) -> Any:
    return lambda tensors, x: penalised(tensors[0], x), ([tensor], leaf(3, 4))


def closed_over(tensor: Tensor) -> Any:
    return lambda x: penalised(tensor, x), (leaf(3, 4),)


class Weighted(nn.Module):
    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.detach())

    def forward(self, x: Tensor) -> Tensor:
        return penalised(self.weight, x)


def of_a_module(tensor: Tensor) -> Any:
    return Weighted(tensor), (leaf(3, 4),)


@pytest.mark.parametrize("is_stored", [False, True], ids=["in_place", "stored"])
@pytest.mark.parametrize("is_leaf", [True, False], ids=["leaf", "result"])
@pytest.mark.parametrize("when", ["before", "after", "removed"])
@pytest.mark.parametrize("find", [as_an_argument, in_a_tuple, in_a_list, closed_over, of_a_module])
def test_hooks_that_come_and_go(find: Any, when: str, is_leaf: bool, is_stored: bool) -> None:
    """The gradient inside of the region is that of the forward, whatever is hooked on the tensor by the backward."""

    def train(wrap: Wrap) -> Any:
        found = []
        for _ in range(STEPS):
            start = leaf(3, 4)
            tensor = start if is_leaf else start * 2
            fn, args = find(tensor)
            hooked = fn.weight if isinstance(fn, nn.Module) else tensor
            handle = hooked.register_hook(halve) if when != "after" else None
            out = (wrap(fn, inputs=Shelf()) if is_stored else wrap(fn))(*args)
            if when == "after":
                hooked.register_hook(halve)
            if when == "removed":
                handle.remove()
            x = args[-1]
            if is_stored:
                del tensor, hooked, args, fn, handle  # so that something stands in for what is in the storage
            backward(out)
            found += [start.grad, x.grad]
        return found

    check_program(Program(train))


# -- hooks that a region registers ------------------------------------------------------------------------------------


def counted(counts: list[int]) -> Any:
    def hook(gradient: Tensor) -> Tensor:
        counts[0] += 1
        return gradient * 2

    return hook


@right
def hook_on_a_tensor_that_is_closed_over(wrap: Wrap) -> Any:
    found = []
    for _ in range(STEPS):
        start, counts = leaf(4), [0]
        tensor = start * 2

        def forward(x: Tensor) -> Tensor:
            tensor.register_hook(counted(counts))
            return (tensor * x).sin()

        backward(wrap(forward)(leaf(4)))
        found += [start.grad, counts[0]]
    return found


@right
def hook_on_a_tensor_in_a_tuple_that_hooks_have_moved(wrap: Wrap) -> Any:
    found = []
    for _ in range(STEPS):
        start, counts = leaf(4), [0]

        def forward(pair: tuple[Tensor, int]) -> Tensor:
            pair[0].register_hook(counted(counts))
            return pair[0].sin()

        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.clone(), lambda tensor: tensor):
            out = wrap(forward)((start * 2, 1))
        backward(out)
        found += [start.grad, counts[0]]
    return found


@right
def hook_on_a_tensor_in_a_list(wrap: Wrap) -> Any:
    found = []
    for _ in range(STEPS):
        start, counts = leaf(4), [0]

        def forward(tensors: list[Tensor]) -> Tensor:
            tensors[0].register_hook(counted(counts))
            return tensors[0].sin()

        backward(wrap(forward)([start * 2]))
        found += [start.grad, counts[0]]
    return found


@right
def hooks_in_another_order(wrap: Wrap) -> Any:
    """They are called in the order that they had in the forward."""
    found = []
    for _ in range(STEPS):
        start = leaf(3, 4)
        tensor, x = start * 2, leaf(3, 4)
        tensor.register_hook(halve)
        tensor.register_hook(lambda gradient: gradient + 1)
        out = wrap(penalised)(tensor, x)
        hooks: Any = tensor._backward_hooks
        hooks.move_to_end(next(iter(hooks)))
        backward(out)
        found += [start.grad, x.grad]
    return found


# -- what else tensors in containers have -------------------------------------------------------------------------------


@right
def gradient_of_a_leaf_in_a_list_that_the_region_adds_to(wrap: Wrap) -> Any:
    weights, found = [leaf(4)], []

    def forward(x: Tensor, weights: list[Tensor]) -> Tensor:
        h = (x * weights[0]).sin()
        if weights[0].grad is not None:
            h = h + weights[0].grad
        (h.detach() * weights[0]).sum().backward()
        return h * weights[0]

    for _ in range(STEPS):
        x = leaf(4)
        backward(wrap(forward)(x * 2, weights))
        found += [x.grad, weights[0].grad.clone()]  # type: ignore[union-attr]
    return found


@right
def attribute_of_a_tensor_in_a_list_that_the_region_sets(wrap: Wrap) -> Any:
    weights: Any = [leaf(4)]
    found = []

    def forward(x: Tensor, weights: Any) -> Tensor:
        calls = getattr(weights[0], "calls", 0)
        weights[0].calls = calls + 1
        return (x * weights[0] * (calls + 1)).sin()

    for _ in range(STEPS):
        x = leaf(4)
        backward(wrap(forward)(x * 2, weights))
        found += [x.grad, weights[0].calls]
    return found

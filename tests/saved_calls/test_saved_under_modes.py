"""Dispatch modes of the user's, in and around a region: they see the ops that they see without one, and no other."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from count_ops import CountOps
from several import each
from state_programs import Program, Wrap, backward, check_program
from torch import Tensor, nn

import reactivate
from reactivate import policies

STEPS = 3  # the third call is not compared

OPTIONS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "every": {"check": "every"},
    "linear": {"policy": policies.save_ops("linear")},
    "sin": {"policy": policies.save_ops("sin", "cos")},
    "ops": {"policy": lambda site: reactivate.Save() if site.op else None},
    "ops, every": {"policy": lambda site: reactivate.Save() if site.op else None, "check": "every"},
    "modules": {"policy": policies.save_modules("first", "second")},
    "modules, every": {"policy": policies.save_modules("first", "second"), "check": "every"},
}


class Model(nn.Module):
    """Ops under a mode, and a product with the number of those that it has seen."""

    def __init__(self, mode: Any, is_inside: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.mode, self.is_inside = mode, is_inside

    def forward(self, x: Tensor) -> Tensor:
        with self.mode if self.is_inside else nullcontext():
            y = self.first(x.cos()).sin().cos()
        y = self.second(y).sin()
        return y * torch.full((4,), float(self.mode.ops.total())).sin() if self.is_inside else y


@pytest.mark.parametrize("is_inside", [True, False])
@each("options", OPTIONS, ids=str)
def test_a_mode_sees_the_ops_of_the_plain_program(options: str, is_inside: bool) -> None:
    def train(wrap: Wrap) -> Any:
        mode = CountOps()
        model, found = Model(mode, is_inside), []
        checkpointed: Callable[[Tensor], Tensor] = wrap(model, **OPTIONS[options])
        for _ in range(STEPS):
            model.zero_grad()
            with nullcontext() if is_inside else mode:
                y = checkpointed(torch.randn(3, 4))
            backward(y)
            found += [{**mode.ops}, *[parameter.grad for parameter in model.parameters()]]
        return found

    check_program(Program(train, recomputations=STEPS))


def linearized(linear: nn.Linear, x: Tensor) -> Tensor:
    """A linearization: the function is traced, and what torch.fx writes of it runs."""
    value, change = torch.func.linearize(lambda y: linear(y).tanh(), x)
    return value * change(torch.ones_like(x))  # type: ignore[no-any-return]


def functionalized(linear: nn.Linear, x: Tensor) -> Tensor:
    return torch.func.functionalize(lambda y: y.clone().add_(1))(linear(x)).sin()  # type: ignore[no-any-return]


TRACED: dict[str, dict[str, Any]] = OPTIONS | {
    "tanh": {"policy": policies.save_ops("tanh")},
    "clone": {"policy": policies.save_ops("clone")},
    "compute_intensive": {"policy": policies.compute_intensive()},
}


@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node:UserWarning")
@pytest.mark.parametrize("fn", [linearized, functionalized])
@each("options", [name for name in TRACED if "modules" not in name])
def test_what_is_traced_inside_of_a_region_is_neither_saved_nor_compared(options: str, fn: Any) -> None:
    def train(wrap: Wrap) -> Any:
        linear, found = nn.Linear(4, 4), []
        checkpointed: Callable[[Tensor], Tensor] = wrap(lambda x: fn(linear, x), **TRACED[options])
        for _ in range(STEPS):
            linear.zero_grad()
            x = torch.randn(3, 4, requires_grad=True)
            backward(checkpointed(x))
            found += [x.grad, linear.weight.grad]
        return found

    check_program(Program(train, recomputations=STEPS))

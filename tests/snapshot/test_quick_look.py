"""Objects that a module leads to and that did not change for some calls: a quick look sees the first change of each kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from several import each
from state_programs import Program, Wrap, backward, check_program, curve, leaf
from torch import Tensor, nn

import reactivate
from reactivate._snapshot.trees import whole_trees

STEPS, LATE = 8, 4  # the first, second and fourth call are compared; the fifth is not
FACTOR = 1.0


def factor_of(scale: float = 1.0) -> float:
    return scale


AS_WRITTEN = factor_of.__code__, factor_of.__defaults__


def other_factor_of(scale: float = 1.0) -> float:
    return scale + 1


class Mild:
    @property
    def factor(self) -> float:
        return 1.0


class Strong:
    @property
    def factor(self) -> float:
        return 2.0


class Reaching(nn.Module):
    """A module that reaches an object of each kind, and multiplies by what they hold."""

    shared = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.settings: dict[str, Any] = {"factor": 1.0, "many": {"inner": 1.0}}
        self.factors = [1.0, 1.0]
        self.mood = Mild()
        self.closed = self.closing(1.0)
        self.late = -1

    @staticmethod
    def closing(factor: float) -> Callable[[], float]:
        def multiply(by: float | None = None) -> float:
            nonlocal factor
            factor = factor if by is None else by
            return factor

        return multiply

    def forward(self, x: Tensor, change: Callable[[Reaching], None] | None = None) -> Tensor:
        if change is not None:
            change(self)
        found = [
            self.settings["factor"] + self.settings["many"]["inner"] + sum(self.factors) + len(self.factors),
            self.mood.factor + self.closed() + factor_of() + FACTOR + type(self).shared,
            getattr(factor_of, "extra", 0.0),
        ]
        return curve(self.linear(x), sum(found))


def set_global(value: float) -> None:
    global FACTOR
    FACTOR = value


def give(function: Any, name: str, value: Any) -> None:
    setattr(function, name, value)


CHANGES: dict[str, Callable[[Reaching], None]] = {
    "item of a dict": lambda it: it.settings.update(factor=it.settings["factor"] + 1),
    "new item of a dict inside": lambda it: it.settings["many"].update(inner=3.0, more=1),
    "item of a list": lambda it: it.factors.__setitem__(1, it.factors[1] + 2),
    "length of a list": lambda it: it.factors.append(1.0),
    "order of a list": lambda it: it.factors.sort(reverse=True),
    "class of an object": lambda it: setattr(it.mood, "__class__", Strong),
    "closed-over variable": lambda it: it.closed(it.closed() + 1),  # type: ignore[call-arg, func-returns-value]
    "name at module level": lambda it: set_global(FACTOR + 1),
    "attribute of the class": lambda it: setattr(Reaching, "shared", Reaching.shared + 1),
    "code of a function": lambda it: give(factor_of, "__code__", other_factor_of.__code__),
    "default of a function": lambda it: give(factor_of, "__defaults__", (factor_of() + 1,)),
    "attribute of a function": lambda it: give(factor_of, "extra", getattr(factor_of, "extra", 0.0) + 1),
}


@pytest.fixture(autouse=True)
def as_it_was() -> Any:
    yield
    reset()


def reset() -> None:
    set_global(1.0)
    Reaching.shared = 1.0
    factor_of.__code__, factor_of.__defaults__ = AS_WRITTEN
    vars(factor_of).clear()


@pytest.mark.parametrize("when", ["in the region", "between forward and backward", "before the forward"])
@each("kind", CHANGES, ids=str)
def test_the_first_change_is_seen(kind: str, when: str) -> None:
    def train(wrap: Wrap) -> Any:
        reset()
        module, found = Reaching(), []
        checkpointed = wrap(module)
        for step in range(STEPS):
            x, change = leaf(3, 4), CHANGES[kind] if step >= LATE else None
            if step == LATE and wrap is reactivate.checkpoint:
                assert whole_trees.kept[id(module)]._look is not None, "there is a quick look by now"
            if change is not None and when == "before the forward":
                change(module)
            out = checkpointed(x, change if when == "in the region" else None)
            if change is not None and when == "between forward and backward":
                change(module)
            module.linear.zero_grad()
            backward(out)
            found += [x.grad, module.linear.weight.grad]
        return found, factor_of(), FACTOR, module.factors, module.settings, Reaching.shared, vars(factor_of).copy()

    check_program(Program(train, recomputations=STEPS))

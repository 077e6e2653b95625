"""Changes that saved calls make beside their arguments: such a call runs again, and its reason says why."""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from journal import Journal
from oracle import Case, assert_same, check, run
from saved_call_cases import SAVED, Fn, Reasons, leaf, saved, weighted
from torch import Tensor, nn

import reactivate
from reactivate._passes.observing import observed_by

count_of_calls = 0
names: list[Any] = []
total = torch.ones(4, 4)


class Counter:
    kinds = 0
    values: list[Any]

    def __init__(self) -> None:
        self.count = 0
        self.other: Any = self


class Slots:
    __slots__ = ("count",)


def in_a_list() -> tuple[Fn, Fn]:
    counts = [0]

    def change(y: Tensor) -> None:
        counts[0] += 1

    return change, lambda: counts[0]


def in_a_cell() -> tuple[Fn, Fn]:
    count = 0

    def change(y: Tensor) -> None:
        nonlocal count
        count += 1

    return change, lambda: count


def in_a_dict() -> tuple[Fn, Fn]:
    found: dict[str, Any] = {}

    def change(y: Tensor) -> None:
        found["count"] = found.get("count", 0) + 1

    return change, lambda: found["count"]


def in_a_set() -> tuple[Fn, Fn]:
    found: set[int] = set()
    return lambda y: found.add(len(found)), lambda: len(found)


def in_a_deque() -> tuple[Fn, Fn]:
    found: deque[int] = deque(maxlen=3)
    return lambda y: found.append(len(found) + 1), lambda: sum(found)


def in_an_attribute() -> tuple[Fn, Fn]:
    counter = Counter()

    def change(y: Tensor) -> None:
        counter.other.count += 1

    return change, lambda: counter.count


def in_a_slot() -> tuple[Fn, Fn]:
    counter = Slots()
    counter.count = 0

    def change(y: Tensor) -> None:
        counter.count += 1

    return change, lambda: counter.count


def in_a_name() -> tuple[Fn, Fn]:
    def change(y: Tensor) -> None:
        global count_of_calls
        count_of_calls += 1

    return change, lambda: count_of_calls


def in_a_function() -> tuple[Fn, Fn]:
    def change(y: Tensor) -> None:
        change.count = getattr(change, "count", 0) + 1  # type: ignore[attr-defined]

    return change, lambda: change.count  # type: ignore[attr-defined]


def in_an_array() -> tuple[Fn, Fn]:
    array = numpy.zeros(3)

    def change(y: Tensor) -> None:
        array[0] += 1

    return change, lambda: float(array.sum())


def in_a_class() -> tuple[Fn, Fn]:
    counter = Counter()

    def change(y: Tensor) -> None:
        type(counter).kinds += 1

    return change, lambda: counter.kinds


def in_running_statistics() -> tuple[Fn, Fn]:
    mean, var = torch.zeros(4), torch.ones(4)

    def change(y: Tensor) -> None:
        F.batch_norm(y, mean, var, training=True)

    return change, lambda: mean.clone()


def a_tensor_in_a_list() -> tuple[Fn, Fn]:
    found: list[Tensor] = []
    return lambda y: found.append(y * 2), lambda: found[-1]


def a_tensor_in_a_list_at_module_level() -> tuple[Fn, Fn]:
    names.clear()
    return lambda y: names.append(y * 2), lambda: names[-1]


def a_write_to_a_tensor_at_module_level() -> tuple[Fn, Fn]:
    total.fill_(1)
    return lambda y: total.add_(1), lambda: total.clone()


def a_new_object() -> tuple[Fn, Fn]:
    counter = Counter()

    def change(y: Tensor) -> None:
        counter.other = {"count": 1}

    def read() -> Any:
        counter.other["count"] += 1
        return counter.other["count"]

    return change, read


def an_iterator() -> tuple[Fn, Fn]:
    iterator = iter(range(1, 100))
    return lambda y: next(iterator), lambda: next(iterator)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (in_a_list, "a list"),
        (in_a_cell, "a cell"),
        (in_a_dict, "a dict"),
        (in_a_set, "a set"),
        (in_a_deque, "a deque"),
        (in_an_attribute, "a Counter"),
        (in_a_slot, "a Slots"),
        (in_a_name, "it changes `count_of_calls`"),
        (in_a_function, "a function"),
        (in_an_array, "a ndarray"),
        (in_a_class, "a type"),
        (in_running_statistics, "it writes to a tensor that the region reads"),
        (a_tensor_in_a_list, "a list"),
        (a_tensor_in_a_list_at_module_level, "a list"),
        (a_write_to_a_tensor_at_module_level, "it writes to a tensor that the region reads"),
        (a_new_object, "a Counter"),
        (an_iterator, "an iterator"),
    ],
)
@pytest.mark.parametrize("determinism", ["first", "metadata"])
def test_a_call_with_an_effect_runs_again_and_says_which(make: Any, reason: str, determinism: Any) -> None:
    def made(calls: Journal) -> Case:
        change, read = make()

        def call(y: Tensor, w: Tensor) -> Tensor:
            calls.append(1)
            with torch.no_grad():
                change(y)
            return y * w

        def fn(x: Tensor) -> Tensor:
            for _ in range(2):
                x = (saved(call)(x.sin(), w).tanh() * read()).sin()
            return x.exp()

        w = leaf()
        return Case(fn, (leaf(),), leaves={"w": w})

    global count_of_calls
    found = []
    for wrap in (None, partial(reactivate.checkpoint, policy=SAVED, check=determinism)):
        count_of_calls = Counter.kinds = 0
        calls = Journal()
        found.append(run(partial(made, calls), wrap))
    assert_same(*found)
    assert found[1].regions == 1 and len(calls) == 4
    calls.clear()
    with observed_by(reasons := Reasons()):
        case = made(calls)
        reactivate.checkpoint(case.fn, policy=SAVED, check=determinism)(*case.args).sum().backward()
    assert len(reasons.found) == 2 and all(reason in str(item) for item in reasons.found), reasons.found
    assert len(calls) == 4


def test_what_a_call_changes_in_a_variable_of_the_region_is_changed_again() -> None:
    def fn(call: Fn, x: Tensor, w: Tensor) -> Tensor:
        counts, count = [0], 0

        def inner(y: Tensor, w: Tensor) -> Tensor:
            nonlocal count
            count += 2
            counts[0] += 3
            return call(y, w)

        return (saved(inner)(x.sin(), w).exp() * counts[0] * count).sin()

    check(weighted(partial(fn, torch.mul)), policy=SAVED, saves_memory=False)


class Leaves(nn.Module):
    """Leaves tensors with a graph in itself, which are gone by the time of the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.found: list[Tensor] = []

    def call(self, y: Tensor) -> Tensor:
        self.left = y.cos()
        self.found.append(y * 2)
        return self.linear(y).tanh()

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            self.before = x.cos()
            y = saved(self.call)(x.sin())
            x = (y.exp() * self.left * self.found[-1] * self.before).sin()
            self.before = self.left = None  # type: ignore[assignment]
            self.found.clear()
        return x


@pytest.mark.parametrize("early_stop", [True, False])
def test_tensors_that_a_saved_call_leaves_in_a_module(early_stop: bool) -> None:
    check(lambda: Case(Leaves(), (leaf(),)), policy=SAVED, early_stop=early_stop, saves_memory=False)

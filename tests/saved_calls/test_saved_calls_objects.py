"""Objects and containers that saved calls are given and return: each recomputation has its own."""

from __future__ import annotations

import weakref
from collections import OrderedDict, defaultdict, deque, namedtuple
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy
import pytest
import torch
from journal import Journal
from oracle import Case, assert_same, check, run
from saved_call_cases import SAVED, Fn, compare_call, leaf, saved, weighted
from several import each
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

import reactivate
from reactivate import policies

# -- results that are objects -----------------------------------------------------------------------------------------


class Held:
    copied: Tensor
    parts: Any


class Slotted:
    __slots__ = ("one", "parts")


class Listed(list):  # type: ignore[type-arg]
    note = 0


@dataclass
class Output:
    hidden: Tensor
    parts: list[Any] = field(default_factory=list)


Pair = namedtuple("Pair", "hidden parts")


def plain_object(y: Tensor, w: Tensor) -> Any:
    found = Held()
    found.parts = [y * w, 3]
    return found


def slotted(y: Tensor, w: Tensor) -> Any:
    found = Slotted()
    found.one, found.parts = 1, [y * w]
    return found


def listed(y: Tensor, w: Tensor) -> Any:
    found = Listed([y * w])
    found.parts = [found[0]]  # type: ignore[attr-defined]
    return found


OBJECTS: dict[str, tuple[Fn, Fn]] = {
    "list": (lambda y, w: [y * w, 1], lambda found: found),
    "dict": (lambda y, w: {"parts": [y * w]}, lambda found: found["parts"]),
    "ordered": (lambda y, w: OrderedDict(parts=[y * w]), lambda found: found["parts"]),
    "default": (lambda y, w: defaultdict(list, parts=[y * w]), lambda found: found["parts"]),
    "deque": (lambda y, w: deque([y * w], maxlen=3), lambda found: found),
    "tuple": (lambda y, w: (y * w, [y + w]), lambda found: found[1]),
    "named": (lambda y, w: Pair(y * w, [y + w]), lambda found: found.parts),
    "dataclass": (lambda y, w: Output(y * w, [y + w]), lambda found: found.parts),
    "object": (plain_object, lambda found: found.parts),
    "slots": (slotted, lambda found: found.parts),
    "subclass": (listed, lambda found: found.parts),
}


@pytest.mark.parametrize("name", OBJECTS)
def test_a_result_is_what_it_was_when_the_call_returned(name: str) -> None:
    """The region appends to it, and so does each recomputation, to one of its own."""
    call, parts_of = OBJECTS[name]

    def fn(call: Fn, x: Tensor, w: Tensor) -> Tensor:
        parts = parts_of(call(x.sin(), w))
        count = len(parts)
        parts.append(x.cos())
        total = sum(part.exp() if isinstance(part, Tensor) else part for part in parts)
        return (total * count).sin()  # type: ignore[union-attr]

    compare_call(fn, call, runs=1)


def test_a_set_is_what_it_was_when_the_call_returned() -> None:
    def fn(call: Fn, x: Tensor, w: Tensor) -> Tensor:
        y, names = call(x.sin(), w)
        count = len(names)
        names.add("more")
        return (y * count).exp().sin()

    compare_call(fn, lambda y, w: (y * w, {"one", "two"}), runs=1)


def test_what_occurs_twice_in_a_result_does_so_again() -> None:
    def fn(call: Fn, x: Tensor, w: Tensor) -> Tensor:
        one, two, first, second = call(x.sin(), w)
        one.append(first.cos())
        return (sum(two) * (1 + (first is second)) * len(two)).exp().sin()  # type: ignore[union-attr]

    def call(y: Tensor, w: Tensor) -> Any:
        found = [product := y * w]
        return found, found, product, product

    compare_call(fn, call, runs=1)


def test_an_object_that_cannot_be_made_anew_lets_the_call_run_again() -> None:
    def fn(call: Fn, x: Tensor, w: Tensor) -> Tensor:
        products = call(x.sin(), w)
        return (next(products).exp() * next(products)).sin()

    compare_call(fn, lambda y, w: iter([y * w, y + w]), runs=2)


def test_an_argument_that_is_returned_is_the_callers_own() -> None:
    def fn(call: Fn, x: Tensor, w: Tensor) -> Tensor:
        given: list[Any] = [x.sin()]
        result, product = call(given, w)
        result.append(product)
        return (sum(given) * (1 + (result is given))).exp().sin()  # type: ignore[union-attr]

    compare_call(fn, lambda given, w: (given, given[0] * w), runs=1)


# -- arguments that are objects ---------------------------------------------------------------------------------------


def appends(given: Any, w: Tensor) -> Tensor:
    given.append(given[0] * w)
    return given[0] + w


def sets(given: Any, w: Tensor) -> Tensor:
    given["more"] = given["first"] * w
    return given["first"].exp() * w


def writes(given: Any, w: Tensor) -> Tensor:
    given.hidden.mul_(2)
    return given.hidden.exp() * w


def replaces(given: Any, w: Tensor) -> Tensor:
    given.parts = [given.hidden * w]
    return given.hidden.exp() * w


def consumes(given: Any, w: Tensor) -> Tensor:
    return next(given).exp() * w


CHANGES: dict[str, tuple[Fn, Fn, Fn]] = {
    "list": (lambda y: [y], appends, lambda given: given[-1]),
    "dict": (lambda y: {"first": y}, sets, lambda given: given["more"]),
    "dataclass": (Output, replaces, lambda given: given.parts[0]),
    "tensor in a dataclass": (lambda y: Output(y * 1), writes, lambda given: given.hidden),
    "iterator": (lambda y: iter([y, y.cos()]), consumes, next),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_a_call_does_to_its_arguments_is_done_again(name: str) -> None:
    make, call, read = CHANGES[name]

    def fn(call: Fn, x: Tensor, w: Tensor) -> Tensor:
        given = make(x.sin())
        return (call(given, w) * read(given)).exp().sin()

    compare_call(fn, call, runs=2)


def test_an_argument_that_is_given_other_memory() -> None:
    def call(y: Tensor, w: Tensor) -> Tensor:
        found = y.exp() * w
        y.data = y.data * 2
        return found

    def fn(call: Fn, x: Tensor, w: Tensor) -> Tensor:
        y = x.sin()
        return (call(y, w) * y.cos()).exp()

    compare_call(fn, call, runs=2)


def through_data(y: Tensor) -> None:
    y.data.mul_(2)


def through_numpy(y: Tensor) -> None:
    y.detach().numpy()[...] *= 2


def through_an_array_of_data(y: Tensor) -> None:
    numpy.asarray(y.data)[...] *= 2


class Writer(nn.Module):
    def forward(self, y: Tensor) -> None:
        through_data(y[:2])


class CallableWriter:
    def __call__(self, y: Tensor) -> None:
        through_data(y)


class WriterFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, w: Tensor) -> Tensor:
        through_data(y)
        ctx.save_for_backward(w)
        return y * w

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        (w,) = ctx.saved_tensors
        return gradient * w, gradient


UNSEEN = {
    "data": through_data,
    "numpy": through_numpy,
    "array of data": through_an_array_of_data,
    "module": Writer(),
    "partial": partial(through_data),
    "no_grad": torch.no_grad()(through_data),
    "closure": lambda y: (lambda write: write(y))(through_data),
    "object": CallableWriter(),
}


def unseen_writer(name: str) -> Fn:
    write = UNSEEN[name]

    def call(y: Tensor, w: Tensor) -> Tensor:
        found = y.exp() * w
        write(y)
        return found

    return call


@pytest.mark.parametrize("name", UNSEEN)
def test_a_write_to_an_argument_that_moves_no_version_is_made_again(name: str) -> None:
    def fn(call: Fn, x: Tensor, w: Tensor) -> Tensor:
        y = x.sin()
        return (call(y, w) * y.cos()).exp()

    compare_call(fn, unseen_writer(name), runs=2, policy=SAVED)
    compare_call(fn, unseen_writer(name), runs=2, policy=SAVED, check="metadata")


def test_a_write_to_a_closed_over_tensor_that_moves_no_version_is_made_again() -> None:
    def fn(call: Fn, x: Tensor, w: Tensor) -> Tensor:
        y = x.sin()
        return (saved(lambda w: call(y, w))(w) * y.cos()).exp()

    check(weighted(partial(fn, unseen_writer("data"))), policy=SAVED, check="metadata", saves_memory=False)


def test_a_custom_function_whose_write_moves_no_version_is_made_again() -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        y = x.sin()
        return (WriterFunction.apply(y, w) * y.cos()).exp()

    check(weighted(fn), policy=policies.save_ops(WriterFunction), check="metadata", saves_memory=False)


@each("name", UNSEEN)
@each("determinism", ["first", "metadata"])
def test_a_write_to_a_result_that_moves_no_version_lets_the_call_run_again(name: str, determinism: str) -> None:
    write = UNSEEN[name]

    def fn(call: Fn, x: Tensor, w: Tensor) -> Tensor:
        found = call(x, w)
        write(found)
        return found.sin() * found

    compare_call(fn, lambda x, w: (x * w).exp(), runs=2, check=determinism)


def test_a_region_that_only_reads_a_result_past_versions_skips_the_call() -> None:
    compare_call(lambda call, x, w: (y := call(x, w)).sin() * y.data, lambda x, w: (x * w).exp(), runs=1)


@pytest.mark.parametrize("read", [lambda y: y.data.exp(), lambda y: torch.from_numpy(y.detach().numpy().copy())])
def test_a_call_that_only_reads_past_versions_is_skipped(read: Fn) -> None:
    compare_call(lambda call, x, w: call(x.sin(), w).exp(), lambda y, w: y * w * read(y), runs=1)


def test_what_a_call_leaves_in_a_closure_is_left_again() -> None:
    def fn(call: Fn, x: Tensor, w: Tensor) -> Tensor:
        kept: list[Tensor] = []

        def inner(y: Tensor, w: Tensor) -> Tensor:
            kept.append(call(y, w))
            return kept[0].exp() * w

        return (saved(inner)(x.sin(), w) * kept[0]).sin()

    check(weighted(partial(fn, torch.mul)), policy=SAVED, saves_memory=False)


# -- containers of tensors -------------------------------------------------------------------------------------------


def test_the_arguments_of_a_saved_call_are_not_held() -> None:
    def fn(x: Tensor) -> Tensor:
        y = x.sin()
        alive.append(weakref.ref(y))
        return (saved(torch.mul)(y, 2.0).exp() * saved(lambda given: given[0].t() @ given[0])([y])).sin()

    alive = Journal()
    out = reactivate.checkpoint(fn, policy=SAVED)(leaf())
    assert alive[0]() is None
    out.sum().backward()


@pytest.mark.parametrize("make", [lambda y: [y], lambda y: {"first": y}, Output, lambda y: [[Output(y)]]])
def test_arguments_in_containers_are_recognised(make: Fn) -> None:
    """They are derived: nothing but the result is kept of the call."""

    def product(given: Any, w: Tensor) -> Tensor:
        while not isinstance(given, Tensor):
            values = vars(given) if isinstance(given, Output) else given
            given = next(iter(values.values() if isinstance(values, dict) else values))
        return given * w

    compare_call(lambda call, x, w: call(make(x.sin()), w).exp().sin(), product, runs=1)
    x, w, packed = leaf(), leaf(), []
    with saved_tensors_hooks(lambda tensor: packed.append(tensor) or tensor, lambda tensor: tensor):
        reactivate.checkpoint(lambda x: saved(product)(make(x.sin()), w).exp().sin(), policy=SAVED)(x)
    assert len([tensor for tensor in packed if tensor is not x and tensor is not w]) == 1


class Mixer(nn.Module):
    """Its argument is a container, and it counts its calls in a journal, which nothing rewinds."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.calls = Journal()

    def forward(self, given: Any, *, scale: Any = None) -> Any:
        self.calls.append(1)
        hidden = given["hidden"] if isinstance(given, dict) else given.hidden if isinstance(given, Output) else given[0]
        return Output(self.inner(hidden) * scale[0], [hidden.exp()])


class Model(nn.Module):
    def __init__(self, make: Fn) -> None:
        super().__init__()
        self.make = make
        self.mixer = Mixer()

    def forward(self, x: Tensor) -> Tensor:
        found = self.mixer(self.make(x.sin()), scale=[x.cos()])
        found.parts.append(found.hidden)
        return sum(part.exp() for part in found.parts).sin()  # type: ignore[union-attr]


@pytest.mark.parametrize("make", [lambda y: [y], lambda y: {"hidden": y}, Output])
def test_a_saved_module_with_containers(make: Fn) -> None:
    def made(wrapped: list[nn.Module]) -> Case:
        model = Model(make)
        wrapped.append(model)
        return Case(model, (leaf(),))

    models: list[nn.Module] = []
    plain = run(partial(made, models))
    ours = run(partial(made, models), lambda fn: reactivate.checkpoint(fn, policy=policies.save_modules("mixer")))
    assert_same(plain, ours)
    assert ours.regions == 1 and [len(model.mixer.calls) for model in models] == [1, 1]  # type: ignore[union-attr]

"""Saved calls that do more than compute: writes, objects, containers, other checkpoints. Every bit is the plain one's."""

from __future__ import annotations

import copy
import weakref
from collections import OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from journal import Journal
from oracle import Case, Watched, assert_same, check, run
from several import each
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import reactivate
from reactivate import policies
from reactivate._passes.observing import observed_by

SAVED = policies.save_names("saved")
Fn = Callable[..., Any]


def saved(fn: Fn) -> Fn:
    return reactivate.site(fn, name="saved")


def counting(calls: Journal, fn: Fn) -> Fn:
    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return fn(*args, **kwargs)

    return counted


def leaf(*shape: int) -> Tensor:
    return torch.randn(*(shape or (4, 4)), requires_grad=True)


def weighted(fn: Fn) -> Callable[[], Case]:
    """A case of `fn(x, w=w)`."""

    def make() -> Case:
        w = leaf()
        return Case(partial(fn, w=w), (leaf(),), leaves={"w": w})

    return make


def compare(fn: Fn, call: Fn, runs: int, policy: Any = SAVED, **options: Any) -> None:
    """`fn(saved call, x, w)` is bitwise the plain function, once and twice; the call runs so often in all."""
    for backwards in (1, 2):

        def backward(outputs: list[Tensor], inputs: dict[str, Tensor]) -> None:
            for number in range(backwards):
                sum(out.square().sum() for out in outputs).backward(retain_graph=number < backwards - 1)  # type: ignore[union-attr]

        calls = Journal()
        plain = run(weighted(partial(fn, saved(call))), None, backward)
        ours = run(
            weighted(partial(fn, saved(counting(calls, call)))),
            partial(reactivate.checkpoint, policy=policy, **options),
            backward,
        )
        assert_same(plain, ours)
        assert ours.regions >= 1, "there was a region"
        assert len(calls) == (1 if runs == 1 else 1 + backwards)


# -- what is derived from an argument ---------------------------------------------------------------------------------


def clone_then_write(x: Tensor, w: Tensor) -> Tensor:
    copied = x.clone()
    with torch.no_grad():
        copied.mul_(2)
    return copied * w


def clone_of_clone(x: Tensor, w: Tensor) -> Tensor:
    copied = x.clone()
    with torch.no_grad():
        copied.mul_(2)
    return copied.clone() * w


def clone_then_view(x: Tensor, w: Tensor) -> Tensor:
    copied = x.clone()
    with torch.no_grad():
        copied.mul_(2)
    return copied.t() * w


def write_then_view(x: Tensor, w: Tensor) -> Tensor:
    copied = x.clone()
    copied[0] = 0
    return copied.t() * w


def without_a_graph(x: Tensor, w: Tensor) -> Tensor:
    constant = torch.ones(4, 4, dtype=torch.float64).float()
    return constant.mul_(2) * x * w


def use(x: Tensor, w: Tensor, other: Tensor) -> Tensor:
    return x * other.t() * w


def region(call: Fn, x: Tensor, w: Tensor) -> Tensor:
    y = x.sin()
    return call(y, w).exp() * y.cos()


@pytest.mark.parametrize("call", [clone_then_write, clone_of_clone, clone_then_view, write_then_view, without_a_graph])
def test_a_copy_that_is_written_to_is_no_copy_any_more(call: Fn) -> None:
    compare(region, call, runs=1)


def test_a_copy_made_before_its_origin_was_written_to() -> None:
    def fn(call: Fn, x: Tensor, w: Tensor) -> Tensor:
        y = x.tanh() + 1
        copied = y.clone()
        with torch.no_grad():
            y.mul_(3)
        return call(y, w, copied).exp().sin()

    def call(y: Tensor, w: Tensor, copied: Tensor) -> Tensor:
        return (copied.t() * w) + y

    compare(fn, call, runs=1)


def test_a_copy_from_a_closure_made_before_its_origin_was_written_to() -> None:
    def fn(call: Fn, x: Tensor, w: Tensor) -> Tensor:
        y = x + 1
        held = Held()
        held.copied = y.clone()
        with torch.no_grad():
            y.mul_(3)
        return call(y, w, held).exp().sin()

    compare(fn, lambda y, w, held: held.copied * w + y, runs=1)


def test_a_cast_of_a_leaf_made_before_the_leaf_was_written_to() -> None:
    """The plain model goes on with the cast that autocast has in its cache."""

    def fn(call: Fn, x: Tensor, w: Tensor) -> Tensor:
        v = w.detach().clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            y = call(x.sin(), v)
            with torch.no_grad():
                v.mul_(2)
            return call(y.sin(), v).float().exp() * w

    linear = policies.every_nth(2, policies.save_ops("linear"), 1)
    for policy in (linear, policies.save_ops("linear")):
        check(weighted(partial(fn, F.linear)), policy=policy, saves_memory=False)


def test_a_weight_that_is_cast_once_for_two_saved_calls_is_not_kept() -> None:
    w, x = nn.Parameter(torch.randn(64, 64)), leaf(2, 64)

    def fn(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return F.linear(F.linear(x, w).sin(), w).exp()

    packed: list[Tensor] = []
    with saved_tensors_hooks(lambda tensor: packed.append(tensor) or tensor, lambda tensor: tensor):
        out = reactivate.checkpoint(fn, policy=policies.save_ops("linear"))(x)
    assert sum(tensor.nbytes for tensor in packed if tensor is not w) < 64 * 64 * 2
    out.sum().backward()


def test_nothing_is_compared_by_contents(monkeypatch: pytest.MonkeyPatch) -> None:
    """On an accelerator each comparison would wait for the device."""

    def fail(*args: Any) -> bool:
        raise AssertionError("compared")

    constant = torch.randn(4, 4, dtype=torch.float64)
    fn = reactivate.checkpoint(
        lambda x: (x.sin() * constant.float()).exp(), policy=policies.save_ops("mul"), check="metadata"
    )
    monkeypatch.setattr(torch, "equal", fail)
    fn(leaf()).sum().backward()


def test_a_tensor_that_is_written_to_after_it_was_saved_raises_as_without_a_region() -> None:
    def write(x: Tensor, w: Tensor) -> Tensor:
        y = x.exp() * 1
        result = y * w
        y.mul_(2)
        return result

    x, w = leaf(), leaf()
    for wrap in (lambda fn: fn, lambda fn: reactivate.checkpoint(fn, policy=SAVED)):
        out = wrap(lambda x: saved(write)(x.sin(), w).exp())(x)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


def test_a_parameter_whose_cast_was_derived_and_that_changed_is_refused() -> None:
    w, x = nn.Parameter(torch.randn(4, 4)), leaf()

    def fn(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return F.linear(x.sin(), w).float().exp()

    out = reactivate.checkpoint(fn, policy=policies.save_ops("linear"))(x)
    with torch.no_grad():
        w.mul_(2)
    with pytest.raises(reactivate.errors.ReactivateError, match="inplace"):
        out.sum().backward()


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

    compare(fn, call, runs=1)


def test_a_set_is_what_it_was_when_the_call_returned() -> None:
    def fn(call: Fn, x: Tensor, w: Tensor) -> Tensor:
        y, names = call(x.sin(), w)
        count = len(names)
        names.add("more")
        return (y * count).exp().sin()

    compare(fn, lambda y, w: (y * w, {"one", "two"}), runs=1)


def test_what_occurs_twice_in_a_result_does_so_again() -> None:
    def fn(call: Fn, x: Tensor, w: Tensor) -> Tensor:
        one, two, first, second = call(x.sin(), w)
        one.append(first.cos())
        return (sum(two) * (1 + (first is second)) * len(two)).exp().sin()  # type: ignore[union-attr]

    def call(y: Tensor, w: Tensor) -> Any:
        found = [product := y * w]
        return found, found, product, product

    compare(fn, call, runs=1)


def test_an_object_that_cannot_be_made_anew_lets_the_call_run_again() -> None:
    def fn(call: Fn, x: Tensor, w: Tensor) -> Tensor:
        products = call(x.sin(), w)
        return (next(products).exp() * next(products)).sin()

    compare(fn, lambda y, w: iter([y * w, y + w]), runs=2)


def test_an_argument_that_is_returned_is_the_callers_own() -> None:
    def fn(call: Fn, x: Tensor, w: Tensor) -> Tensor:
        given: list[Any] = [x.sin()]
        result, product = call(given, w)
        result.append(product)
        return (sum(given) * (1 + (result is given))).exp().sin()  # type: ignore[union-attr]

    compare(fn, lambda given, w: (given, given[0] * w), runs=1)


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

    compare(fn, call, runs=2)


def test_an_argument_that_is_given_other_memory() -> None:
    def call(y: Tensor, w: Tensor) -> Tensor:
        found = y.exp() * w
        y.data = y.data * 2
        return found

    def fn(call: Fn, x: Tensor, w: Tensor) -> Tensor:
        y = x.sin()
        return (call(y, w) * y.cos()).exp()

    compare(fn, call, runs=2)


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

    compare(fn, unseen_writer(name), runs=2, policy=SAVED)
    compare(fn, unseen_writer(name), runs=2, policy=SAVED, check="metadata")


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

    compare(fn, lambda x, w: (x * w).exp(), runs=2, check=determinism)


def test_a_region_that_only_reads_a_result_past_versions_skips_the_call() -> None:
    compare(lambda call, x, w: (y := call(x, w)).sin() * y.data, lambda x, w: (x * w).exp(), runs=1)


@pytest.mark.parametrize("read", [lambda y: y.data.exp(), lambda y: torch.from_numpy(y.detach().numpy().copy())])
def test_a_call_that_only_reads_past_versions_is_skipped(read: Fn) -> None:
    compare(lambda call, x, w: call(x.sin(), w).exp(), lambda y, w: y * w * read(y), runs=1)


def test_what_a_call_leaves_in_a_closure_is_left_again() -> None:
    def fn(call: Fn, x: Tensor, w: Tensor) -> Tensor:
        kept: list[Tensor] = []

        def inner(y: Tensor, w: Tensor) -> Tensor:
            kept.append(call(y, w))
            return kept[0].exp() * w

        return (saved(inner)(x.sin(), w) * kept[0]).sin()

    check(weighted(partial(fn, torch.mul)), policy=SAVED, saves_memory=False)


# -- what a call changes beside its arguments --------------------------------------------------------------------------

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
    class Reasons(Watched):
        def forward_done(self, record: Any) -> None:
            reasons[:] = [call.reason for call in record.saved_calls]
            super().forward_done(record)

    reasons: list[Any] = []

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
    with observed_by(Reasons()):
        case = made(calls)
        reactivate.checkpoint(case.fn, policy=SAVED, check=determinism)(*case.args).sum().backward()
    assert len(reasons) == 2 and all(reason in str(item) for item in reasons), reasons
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

    compare(lambda call, x, w: call(make(x.sin()), w).exp().sin(), product, runs=1)
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


# -- modules of a checkpointed module ---------------------------------------------------------------------------------


class Counted(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)
        self.calls = Journal()

    def forward(self, x: Tensor) -> Tensor:
        self.calls.append(1)
        return super().forward(x)


@pytest.mark.parametrize("early_stop", [True, False])
def test_a_policy_of_modules_for_a_checkpointed_module(early_stop: bool) -> None:
    def make(models: list[nn.Sequential]) -> Case:
        models.append(nn.Sequential(Counted(), nn.Tanh(), Counted(), nn.Tanh()))
        return Case(models[-1], (leaf(),))

    models: list[nn.Sequential] = []
    plain = run(partial(make, models))
    policy = policies.save_modules("0")
    ours = run(
        partial(make, models),
        partial(reactivate.checkpoint, policy=policy, early_stop=early_stop, check="metadata"),
    )
    assert_same(plain, ours)
    counts = [[len(model[index].calls) for index in (0, 2)] for model in models]  # type: ignore[union-attr,arg-type]
    assert counts == [[1, 1], [1, 2]] and ours.regions == 1
    assert all("forward" not in vars(module) for model in models for module in model.modules())
    for module in models[1][::2]:
        del module.calls
    copy.deepcopy(models[1])


def test_a_method_of_a_module_and_hooks_of_a_saved_one() -> None:
    seen = Journal()

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = Counted()
            self.first.register_forward_hook(lambda module, args, out: seen.append(1))

        def run(self, x: Tensor) -> Tensor:
            return self.first(x.sin()).exp().sin()

    block, x = Block(), leaf()
    expected = torch.autograd.grad(block.run(x).sum(), x)[0]
    count = len(block.first.calls)
    out = reactivate.checkpoint(block.run, policy=policies.save_modules("first"))(x)
    assert torch.equal(torch.autograd.grad(out.sum(), x)[0], expected)
    assert len(block.first.calls) == count + 1


def test_modules_that_are_not_there_are_refused() -> None:
    with pytest.raises(reactivate.errors.UsageError, match="matches nothing"):
        reactivate.checkpoint(nn.Sequential(nn.Linear(4, 4)), policy=policies.save_modules("7"))(leaf())


def test_the_stand_ins_go_when_the_forward_fails() -> None:
    class Failing(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            raise ArithmeticError

    model = nn.Sequential(nn.Linear(4, 4), Failing(4, 4))
    with pytest.raises(ArithmeticError):
        reactivate.checkpoint(model, policy=policies.save_modules("0"))(leaf())
    assert all("forward" not in vars(module) for module in model.modules())


# -- torch's own checkpoint, and other hooks --------------------------------------------------------------------------


def inner_block(x: Tensor, w: Tensor) -> Tensor:
    return F.dropout(F.linear(x.sin(), w).exp(), 0.3).tanh()


@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("ops", [("linear",), ("linear", "sin", "exp"), ("cos",), ("tanh",), ("dropout",)])
def test_torchs_checkpoint_inside_of_a_region_with_a_policy(
    ops: tuple[str, ...], use_reentrant: bool, early_stop: bool
) -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        y = F.linear(x.cos(), w).tanh()
        y = checkpoint(inner_block, y, w, use_reentrant=use_reentrant)
        return F.linear(F.dropout(y, 0.1).sin(), w).exp().cos()

    check(weighted(fn), policy=policies.save_ops(*ops), early_stop=early_stop, saves_memory=False)


def test_calls_under_hooks_of_the_users_run_again() -> None:
    """The hooks change what the backward reads, also of a saved call."""

    def fn(call: Fn, x: Tensor, w: Tensor) -> Tensor:
        with saved_tensors_hooks(lambda tensor: tensor.bfloat16(), lambda tensor: tensor.float()):
            y = call(x.sin(), w)
        return y.exp().sin()

    compare(fn, lambda y, w: (y * w).exp() * y, runs=2)


# -- ops that fill a tensor after they had it saved -------------------------------------------------------------------

RRELUS: dict[str, Fn] = {
    "module attribute": lambda x: torch.rrelu(x, 0.1, 0.3, True),
    "functional": lambda x: F.rrelu(x, 0.1, 0.3, training=True),
    "partial": partial(torch.rrelu, lower=0.1, upper=0.3, training=True),
    "getattr": lambda x: getattr(torch, "r" + "relu")(x, 0.1, 0.3, True),
    "list": lambda x: [torch.sin, torch.rrelu][1](x, 0.1, 0.3, True),
    "aten": lambda x: getattr(torch.ops.aten, "r" + "relu")(x, 0.1, 0.3, True),
    "alias": lambda x: noisy_relu(x, 0.1, 0.3, True),
    "module": nn.RReLU(0.1, 0.3),
}
noisy_relu = torch.rrelu


@each("policy", [None, policies.save_ops("sin"), policies.save_ops("rrelu"), policies.save_ops("exp")])
@each("name", RRELUS)
def test_rrelu_by_any_name(name: str, policy: Any) -> None:
    """The noise is the last tensor that is saved, and it is filled afterwards."""
    rrelu = RRELUS[name]
    if policy == policies.save_ops("rrelu") and name == "aten":
        pytest.skip("it goes by the same name")
    check(lambda: Case(lambda x: rrelu(x.sin() - x.exp()), (leaf(64, 64),)), policy=policy, saves_memory=False)

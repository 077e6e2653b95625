"""Saved calls in regions inside of regions: how often each runs, what is kept of it, and every bit (Rules 1, 2, 5, 7).

A call runs once in the forward pass. A backward recomputes each region around it, and it runs once more in those that save
neither it nor a call around it: the policy of a region speaks of the calls that are directly inside of it, and of a
region in it as of one call.
"""

from __future__ import annotations

import contextlib
import gc
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain, combinations
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from journal import Journal
from oracle import (
    Case,
    assert_alike,
    assert_bitwise,
    assert_same,
    backward_once,
    backward_twice,
    double_backward,
    leaf,
    run,
    seed_everything,
)
from torch import Tensor, nn

import reactivate
from reactivate import Save, Site, policies
from reactivate._passes.observing import without_regions

DEPTH = 3
calls = Journal()


# -- calls of each kind, which count themselves and draw random numbers -----------------------------------------------


class Noisy(nn.Module):
    def __init__(self, place: str) -> None:
        super().__init__()
        self.place = place
        self.norm = nn.LayerNorm(8)  # without state of its own: a call that moves running statistics runs again

    def forward(self, x: Tensor) -> Tensor:
        calls.append(self.place)
        return F.dropout(self.norm(x).sin(), 0.3)


def noisy(place: str, x: Tensor) -> Tensor:
    calls.append(place)
    return F.dropout(x.sin(), 0.3)


class Noise(torch.autograd.Function):
    place = ""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        x, mask = ctx.saved_tensors
        return gradient * mask * x.cos()


def noise_of(place: str) -> type[Noise]:
    def forward(ctx: Any, x: Tensor) -> Tensor:
        calls.append(place)
        mask = torch.rand_like(x)
        ctx.save_for_backward(x, mask)
        return x.sin() * mask

    return type(place, (Noise,), {"forward": staticmethod(forward)})


PLACES = [f"{name}_{level}" for level in range(DEPTH) for name in ("first", "free", "last")]
FUNCTIONS = {place: noise_of(place) for place in PLACES}
library = torch.library.Library("nested_sites", "DEF")
for _place in PLACES:
    library.define(f"{_place}(Tensor x) -> Tensor")
    library.impl(_place, partial(noisy, _place), "CompositeImplicitAutograd")


@dataclass(frozen=True)
class Kind:
    """A way to make a call, and a policy that saves those at some places."""

    make: Callable[[str], Callable[..., Any]]
    save: Callable[..., Any]


def save_own(*places: str) -> Callable[[Site], Save | None]:
    return lambda at: Save() if at.name in places else None


KINDS = {
    "name": Kind(Noisy, policies.save_names),
    "module": Kind(Noisy, policies.save_modules),
    "op": Kind(
        lambda place: getattr(torch.ops.nested_sites, place),
        lambda *places: policies.save_ops(*(f"nested_sites.{place}" for place in places)),
    ),
    "Function": Kind(
        lambda place: FUNCTIONS[place].apply, lambda *places: policies.save_ops(*(FUNCTIONS[place] for place in places))
    ),
    "own policy": Kind(Noisy, save_own),
}


class Level(nn.Module):
    """A region: a call that may be saved, one that is not, the next level, and another call that may be saved."""

    def __init__(self, kinds: tuple[str, ...], level: int = 0) -> None:
        super().__init__()
        self.level = level
        self.linear = nn.Linear(8, 8)
        for name in ("first", "free", "last"):
            setattr(self, f"{name}_{level}", KINDS[kinds[level]].make(f"{name}_{level}"))
        if level + 1 < DEPTH:
            setattr(self, f"region_{level + 1}", nn.Sequential(Level(kinds, level + 1)))

    def at(self, place: str, x: Tensor) -> Tensor:
        return reactivate.site(getattr(self, place), name=place)(x)

    def forward(self, x: Tensor) -> Tensor:
        level = self.level
        x = self.at(f"first_{level}", self.linear(x).tanh()).exp()
        x = self.at(f"free_{level}", x.tanh()).exp().tanh()
        if level + 1 < DEPTH:
            x = self.at(f"region_{level + 1}", x)
        return self.at(f"last_{level}", x.exp().tanh()).exp()


def made(kinds: tuple[str, ...]) -> Case:
    calls.clear()
    return Case(nn.Sequential(Level(kinds)), (torch.randn(4, 8, requires_grad=True),))


def applied(policy: Any, **options: Any) -> Callable[[Any], Any]:
    def wrap(model: Any) -> Any:
        assert len(reactivate.apply(model, policy, **options).regions) == DEPTH
        return model

    return wrap


def policy_of(kinds: tuple[str, ...], saved: tuple[str, ...]) -> Any:
    """Every level is a region, and what is called at these places is saved."""
    parts = []
    for level, kind in enumerate(kinds):
        places = [place for place in saved if place.endswith(str(level))]
        regions = [place for place in places if place.startswith("region")]
        by_name = KINDS["name"] if kind in ("op", "Function") else KINDS[kind]
        for way, chosen in ((KINDS[kind], [place for place in places if place not in regions]), (by_name, regions)):
            parts += [way.save(*chosen)] if chosen else []
    return policies.first_match(*parts, policies.recompute_modules(Level))


def subsets(items: list[Any]) -> Iterator[tuple[Any, ...]]:
    return chain.from_iterable(combinations(items, size) for size in range(len(items) + 1))


SAVED = [
    (*(f"{name}_{level}" for level in levels for name in ("first", "last")), *(f"region_{level}" for level in regions))
    for levels in subsets([0, 1, 2])
    for regions in subsets([1, 2])
]


def expected(place: str, saved: tuple[str, ...], backwards: int) -> int:
    """Return how often the calls there run."""
    level = int(place[-1])
    outer = [f"region_{number}" for number in range(1, level + (not place.startswith("region")))]
    return 1 + backwards * sum(call not in saved for call in (*outer, place))  # one for each region around it


MIXED = [("name", "op", "Function"), ("Function", "module", "own policy"), ("op", "Function", "name")]
of_all_kinds = pytest.mark.parametrize("kinds", [*((kind,) * DEPTH for kind in KINDS), *MIXED], ids=" ".join)


# -- how often --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("backward", "backwards", "early_stop", "choices"),
    [(backward_once, 1, True, SAVED), (backward_twice, 2, True, SAVED[::2]), (backward_once, 1, False, SAVED[::3])],
    ids=["once", "twice", "no early stop"],
)
@of_all_kinds
def test_a_call_runs_once_more_for_each_region_around_it_that_does_not_save_it(
    kinds: tuple[str, ...], backward: Any, backwards: int, early_stop: bool, choices: list[Any]
) -> None:
    plain = run(partial(made, kinds), None, backward)
    assert Counter(calls) == dict.fromkeys(PLACES, 1)
    regions = [f"region_{level}" for level in range(1, DEPTH)]
    for saved in choices:
        ours = run(
            partial(made, kinds), applied(policy_of(kinds, saved), early_stop=early_stop, check="metadata"), backward
        )
        assert_same(plain, ours)
        assert Counter(calls) == {place: expected(place, saved, backwards) for place in PLACES}, saved
        assert ours.regions == 1 + sum(expected(region, saved, backwards) for region in regions), saved
        assert ours.recomputations == DEPTH * backwards, saved
        assert ours.kept_bytes < plain.kept_bytes, saved


@of_all_kinds
def test_what_a_region_inside_keeps_is_dropped_unless_the_regions_around_it_save_that_region(
    kinds: tuple[str, ...],
) -> None:
    kept = {saved: run(partial(made, kinds), applied(policy_of(kinds, saved))).kept_bytes for saved in SAVED}
    for saved, size in kept.items():
        not_saved = [level for level in range(1, DEPTH) if f"region_{level}" not in saved]
        reached = min([*not_saved, DEPTH])
        assert size == kept[tuple(place for place in saved if int(place[-1]) < reached)], saved
    assert kept[()] < kept["first_0", "last_0"] < kept[SAVED[-1]]


@of_all_kinds
def test_double_backward(kinds: tuple[str, ...]) -> None:
    plain = run(partial(made, kinds), None, double_backward)
    for saved in SAVED[1::3]:
        ours = run(partial(made, kinds), applied(policy_of(kinds, saved)), double_backward)
        assert_same(plain, ours)
        assert ours.recomputations >= DEPTH and ours.kept_bytes < plain.kept_bytes


# -- regions with policies of their own -------------------------------------------------------------------------------


def sine(place: str) -> Callable[[Tensor], Tensor]:
    return reactivate.site(partial(noisy, place), name="sine")


def outer_and_inner(outer: Any, inner: Any, **options: Any) -> Callable[[Tensor], Tensor]:
    """A region inside of a region, with calls of one name in both."""
    inside = reactivate.checkpoint(lambda x: sine("inner")(x.exp()).tanh().exp(), policy=inner, **options)
    return reactivate.checkpoint(
        lambda x: sine("outer")(inside(sine("outer")(x.tanh()).tanh()).tanh()).exp(), policy=outer, **options
    )


SINE = policies.save_names("sine")


# Since torch 2.14 and with public names, a region inside is recomputed once more where the outer one saves ops.
MORE = pytest.mark.fast_ways("a region inside of one that saves ops is recomputed once more there")
OWN = [
    pytest.param(None, None, (4, 3)),
    pytest.param(SINE, None, (2, 3)),
    pytest.param(None, SINE, (4, 2)),
    pytest.param(SINE, SINE, (2, 2)),
    pytest.param(policies.every_nth(2, SINE), policies.every_nth(2, SINE), (3, 2)),  # each counts its own
    pytest.param(policies.every_nth(2, SINE, 1), policies.every_nth(2, SINE, 1), (3, 3)),
    pytest.param(policies.save_ops("tanh"), policies.save_ops("exp"), (4, 3), marks=MORE),
    pytest.param(lambda at: Save(), None, (2, 3)),
    pytest.param(lambda at: Save(), lambda at: Save(), (2, 2), marks=MORE),
]


def own_regions(outer: Any, inner: Any, early_stop: bool) -> tuple[Any, Any]:
    def case() -> Case:
        calls.clear()
        return Case(outer_and_inner(outer, inner, early_stop=early_stop, check="metadata"), (leaf(4, 8),))

    with without_regions():
        plain = run(case)
    return plain, run(case)


@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize(("outer", "inner", "counts"), OWN)
def test_a_policy_speaks_of_its_own_region(outer: Any, inner: Any, counts: tuple[int, int], early_stop: bool) -> None:
    plain, ours = own_regions(outer, inner, early_stop)
    found = Counter(calls)
    assert (found["outer"], found["inner"]) == counts
    assert_same(plain, ours)
    assert ours.regions == 3 and 1 <= ours.recomputations <= 2 and ours.kept_bytes < plain.kept_bytes


@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize(("outer", "inner"), [item.values[:2] for item in OWN if item.marks])
def test_regions_with_policies_of_their_own_are_bitwise(outer: Any, inner: Any, early_stop: bool) -> None:
    plain, ours = own_regions(outer, inner, early_stop)
    assert_same(plain, ours)
    assert ours.regions >= 3 and ours.recomputations >= 1 and ours.kept_bytes < plain.kept_bytes


def test_a_policy_that_names_only_calls_of_a_region_inside_matches_nothing() -> None:
    inside = reactivate.checkpoint(lambda x: sine("inner")(x.exp()).exp())
    region = reactivate.checkpoint(lambda x: inside(x.tanh()).tanh().exp(), policy=SINE)
    with pytest.warns(UserWarning, match=r"save_names\('sine'\) matches nothing"):
        region(leaf(4, 8))


def test_a_policy_that_matches_nothing_is_told_of_no_op_of_a_region_inside() -> None:
    inside = reactivate.checkpoint(lambda x: x.sin().exp())
    region = reactivate.checkpoint(lambda x: inside(x.tanh()), policy=policies.save_ops("sin"))
    with pytest.warns(UserWarning, match=r"save_ops\('sin'\) matches nothing so far.* Calls seen: tanh\."):
        region(leaf(4, 8))


def test_microbatches_in_any_order() -> None:
    """Forward A, forward B, forward C, and their backwards in another order."""

    def step(fn: Callable[[Tensor], Tensor], order: tuple[int, ...]) -> list[Any]:
        seed_everything(0)
        calls.clear()
        inputs = [leaf(4, 8) for _ in order]
        outputs = [fn(x) for x in inputs]
        for index in order:
            outputs[index].sum().backward()
        return [x.grad for x in inputs]

    for order in ((0, 1, 2), (2, 1, 0), (1, 2, 0)):
        with without_regions():
            plain = step(outer_and_inner(SINE, SINE), order)
        ours = step(outer_and_inner(SINE, SINE), order)
        assert Counter(calls) == {"outer": 3 * 2, "inner": 3 * 2}
        assert_alike(plain, ours)


@pytest.mark.parametrize("inner", [None, SINE])
def test_a_shared_recompute_is_one_of_each_region(inner: Any) -> None:
    """First from the result of the region inside to its argument, then from there on."""

    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        y = sine("outer")(x.tanh()).exp()
        return y, inside(y.tanh()).exp()

    inside = reactivate.checkpoint(lambda x: sine("inner")(x.exp()).tanh().exp(), policy=inner)
    found: list[Tensor] = []
    for context, times in ((torch.enable_grad(), 2), (reactivate.shared_recompute(), 1)):
        seed_everything(0)
        calls.clear()
        x = leaf(4, 8)
        y, z = reactivate.checkpoint(fn)(x)
        with context:
            (gradient,) = torch.autograd.grad(z, y, torch.ones_like(z))
            found.append(torch.autograd.grad(y, x, gradient)[0])
        assert Counter(calls)["outer"] == 1 + times
    seed_everything(0)
    x = leaf(4, 8)
    with without_regions():
        _, z = fn(x)
    found.append(torch.autograd.grad(z.sum(), x)[0])
    for gradient in found[:2]:
        assert_bitwise(found[2], gradient, "gradient")


# -- failures, what is left -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["outer", "inner"])
@pytest.mark.parametrize(("outer", "inner"), [(None, SINE), (SINE, None), (SINE, SINE)])
def test_a_recomputation_that_failed_can_be_tried_again(
    outer: Any, inner: Any, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The storage fails at each call of the function that runs again, one after the other."""
    failures = Journal()

    def failing(at: str, x: Tensor) -> Tensor:
        if at == place and reactivate.is_recomputing():
            failures.append(1)
            if len(failures) in (1, 3):
                raise OSError
        return F.dropout(x.sin(), 0.3)

    monkeypatch.setitem(globals(), "noisy", failing)
    x, state = leaf(4, 8), torch.get_rng_state()
    out = outer_and_inner(outer, inner)(x).sum()
    after = torch.get_rng_state()
    for _ in range(3):
        with contextlib.suppress(OSError):
            x.grad = None
            out.backward(retain_graph=True)
            break
    assert_bitwise(after, torch.get_rng_state(), "random numbers")
    torch.set_rng_state(state)
    with without_regions():
        expected_gradient = torch.autograd.grad(outer_and_inner(outer, inner)(x).sum(), x)[0]
    assert_bitwise(expected_gradient, x.grad, "gradient")
    runs_again = place == "inner" or outer is None
    assert (len(failures) > 1) == runs_again, "it failed, and was tried again"


@pytest.mark.parametrize("saved", [SAVED[-1], ("first_2", "last_2"), ("first_0", "region_1", "last_1")])
@of_all_kinds
def test_nothing_outlives_the_backward_without_the_collector(kinds: tuple[str, ...], saved: tuple[str, ...]) -> None:
    case = made(kinds)
    reactivate.apply(case.fn, policy_of(kinds, saved))  # type: ignore[arg-type]
    alive = []
    try:
        for number in range(5):
            case.fn(*case.args).sum().backward()
            if number == 0:  # the second step meets gradients, and so makes objects of them
                continue
            if not alive:
                gc.collect()
                gc.disable()
            alive.append(
                sum(Tensor in type(item).__mro__ for item in gc.get_objects())
            )  # `isinstance` asks each of millions
    finally:
        gc.enable()
    assert alive == alive[:1] * 4, "as many tensors after each step as after the second"

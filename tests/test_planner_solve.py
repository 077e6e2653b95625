"""The planner's solver against brute force, and how much work it does on chains that brute force is too slow for."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import example, given, settings, strategies as st

from reactivate.errors import UsageError
from reactivate.planner.solver import bound, solve as planner_solve
from reactivate.planner.solver.chain import Candidate, Chain, Pick, Solution, Span
from reactivate.planner.solver.solve import Infeasible, frontier, least, solve

Draw = Callable[[Any], Any]

KEEP, RECOMPUTE = Candidate("keep", 0.0, 4, 5), Candidate("recompute", 1.0, 1, 6)
BIG, SMALL = Candidate("big", 1.0, 3, 9), Candidate("small", 1.0, 4, 5)


# -- brute force ------------------------------------------------------------------------------------------------------


def ways(chain: Chain, start: int = 0) -> Iterator[tuple[Pick, ...]]:
    if start == len(chain.menus):
        yield ()
        return
    menus = [(start + 1, chain.menus[start]), *((span.stop, span.menu) for span in chain.spans if span.start == start)]
    for stop, menu in menus:
        rests = list(ways(chain, stop))
        for entry in menu:
            yield from ((Pick(start, stop, entry), *rest) for rest in rests)


def fits(chain: Chain, picks: tuple[Pick, ...], budget_bytes: int) -> bool:
    """The definition: one inequality for each pick, and one for each place between picks."""
    held = [sum(pick.entry.held_bytes for pick in picks[:index]) for index in range(len(picks) + 1)]
    places = [0, *(pick.stop for pick in picks)]
    return all(before + pick.entry.need_bytes <= budget_bytes for before, pick in zip(held, picks)) and all(
        before + chain.outside[place] <= budget_bytes for before, place in zip(held, places)
    )


def seconds_of(picks: tuple[Pick, ...]) -> Fraction:
    return sum((Fraction(pick.entry.seconds) for pick in picks), Fraction(0))


def true_frontier(chain: Chain) -> list[tuple[int, Fraction]]:
    found: list[tuple[int, Fraction]] = []
    for peak_bytes, seconds in sorted((chain.peak_of(picks), seconds_of(picks)) for picks in ways(chain)):
        if not found or seconds < found[-1][1]:
            found.append((peak_bytes, seconds))
    return found


def figures(solution: Solution) -> tuple[int, Fraction]:
    return solution.peak_bytes, seconds_of(solution.picks)


# -- small chains -----------------------------------------------------------------------------------------------------

seconds = st.one_of(
    st.integers(0, 3).map(float),  # ties
    st.integers(0, 2**20).map(lambda number: number / 2**16),
    st.floats(0, 2, allow_subnormal=False).map(lambda value: round(value * 2**40) / 2**40),
)
sizes = st.one_of(st.integers(-3, 6), st.integers(-(2**20), 2**40))


@st.composite
def menus(draw: Draw, most: int = 4) -> tuple[Candidate, ...]:
    return tuple(
        Candidate(f"entry {index}", draw(seconds), draw(sizes), draw(sizes))
        for index in range(draw(st.integers(1, most)))
    )


@st.composite
def chains(draw: Draw) -> Chain:
    count = draw(st.integers(0, 6))
    blocks = (draw(menus()),) * count if draw(st.booleans()) else tuple(draw(menus()) for _ in range(count))
    outside = tuple(draw(sizes) for _ in range(count + 1))
    spans = []
    if count:
        for _ in range(draw(st.integers(0, 3))):
            start = draw(st.integers(0, count - 1))
            spans.append(Span(start, draw(st.integers(start + 1, count)), draw(menus(3))))
    return Chain(blocks, outside, tuple(spans))


@settings(max_examples=250, deadline=None)
@given(chains(), st.sampled_from([0, 3, 1024]), st.sampled_from([1, 2, 256]))
@example(Chain(((KEEP, RECOMPUTE),) * 6, (0, 0, 0, 0, 0, 0, 2)), 0, 1)
@example(Chain(((BIG, SMALL),) * 3, (0, 0, 0, 0)), 0, 1)
def test_what_brute_force_finds(chain: Chain, steps: int, width: int) -> None:
    """For every budget at which anything changes, wherever bounds begin to be hulls, and however often it is searched."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bound, "_STEPS", steps)
        patch.setattr(planner_solve, "_FIRST_WIDTH", 1)
        patch.setattr(planner_solve, "_WIDTH", width)
        expected = true_frontier(chain)
        for index, (peak_bytes, _) in enumerate(expected):
            after = expected[index + 1][0] if index + 1 < len(expected) else peak_bytes + 100
            for budget_bytes in {peak_bytes, (peak_bytes + after) // 2, after - 1}:
                solution = solve(chain, budget_bytes)
                assert figures(solution) == expected[index]
                assert solution.seconds == float(expected[index][1])
                assert solution == chain.solution_of(solution.picks)
        assert figures(least(chain)) == expected[0]
        with pytest.raises(Infeasible) as caught:
            solve(chain, expected[0][0] - 1)
        assert caught.value.least_bytes == expected[0][0]
        found = frontier(chain, limit=max(2, len(expected)))
        assert [figures(solution) for solution in found] == expected


@settings(max_examples=100, deadline=None)
@given(chains(), st.integers(2, 6))
def test_a_thinned_frontier_has_both_ends(chain: Chain, limit: int) -> None:
    expected = true_frontier(chain)
    found = [figures(solution) for solution in frontier(chain, limit)]
    assert len(found) == min(limit, len(expected))
    assert set(found) <= set(expected)
    assert found == sorted(found)
    assert (found[0], found[-1]) == (expected[0], expected[-1])


@settings(max_examples=100, deadline=None)
@given(chains())
def test_a_peak_is_the_smallest_budget_that_fits(chain: Chain) -> None:
    for picks in ways(chain):
        peak_bytes = chain.peak_of(picks)
        assert fits(chain, picks, peak_bytes)
        assert not fits(chain, picks, peak_bytes - 1)


# -- long chains ------------------------------------------------------------------------------------------------------


def measured(count: int, rng: random.Random) -> Chain:
    """Blocks of different sizes, and entries that take longer the less they hold, more or less."""
    blocks = []
    for _ in range(count):
        size = rng.uniform(0.2, 5)
        menu = []
        for index in range(8):
            share = rng.random() if index else 1.0
            held = int(size * 2**36 * share)
            time = size * rng.uniform(0.5, 1.5) * (1 - share) ** rng.uniform(1, 2)
            menu.append(Candidate(str(index), time, held, held + int(rng.uniform(0.3, 1.5) * size * 2**36)))
        blocks.append(tuple(menu))
    return Chain(tuple(blocks), (*(rng.randrange(2**36) for _ in range(count)), 2**38))


def unrelated(count: int, rng: random.Random) -> Chain:
    def size() -> int:
        return rng.randrange(2**40)

    blocks = [tuple(Candidate(str(index), rng.random(), size(), size()) for index in range(8)) for _ in range(count)]
    return Chain(tuple(blocks), tuple(size() for _ in range(count + 1)))


def nearly_in_proportion(count: int, rng: random.Random) -> Chain:
    """The hard ones: time is what is not held, within one part in twenty."""
    blocks = []
    for _ in range(count):
        size = rng.uniform(0.2, 5)
        menu = [Candidate("0", 0.0, int(size * 2**36), int(size * 2**36))]
        for index in range(1, 8):
            held = int(size * 2**36 * rng.random())
            time = (size - held / 2**36) * rng.uniform(0.95, 1.05)
            menu.append(Candidate(str(index), time, held, held))
        blocks.append(tuple(menu))
    return Chain(tuple(blocks), (0,) * count + (2**38,))


def equal(count: int, rng: random.Random) -> Chain:
    return Chain(measured(1, rng).menus * count, (0,) * count + (2**37,))


def with_spans(count: int, rng: random.Random) -> Chain:
    """Every four blocks may also be one region."""
    chain = measured(count, rng)
    spans = []
    for start in range(0, count - 3, 4):
        slow = [max(menu, key=lambda entry: entry.seconds) for menu in chain.menus[start : start + 4]]
        time = sum(entry.seconds for entry in slow) * rng.uniform(1, 1.3)
        need = sum(menu[0].need_bytes for menu in chain.menus[start : start + 4])
        spans.append(Span(start, start + 4, (Candidate("region", time, 2**34, need),)))
    return Chain(chain.menus, chain.outside, tuple(spans))


def budgets(chain: Chain) -> list[int]:
    low_bytes = least(chain).peak_bytes
    fastest = [min(menu, key=lambda entry: entry.seconds) for menu in chain.menus]
    high_bytes = chain.peak_of(chain.picks_of(fastest))
    return [low_bytes + (high_bytes - low_bytes) * tenths // 10 for tenths in (1, 5, 8)]


@pytest.mark.parametrize(
    ("make", "count", "most_states"),
    [
        (measured, 100, 40_000),
        (unrelated, 100, 10_000),
        (equal, 100, 30_000),
        (with_spans, 100, 40_000),
        (nearly_in_proportion, 100, 400_000),
        (measured, 1000, 200_000),
        (unrelated, 1000, 100_000),
    ],
)
def test_the_work_is_bounded(make: Callable[[int, random.Random], Chain], count: int, most_states: int) -> None:
    chain = make(count, random.Random(0))
    allowed = budgets(chain)
    found = [solve(chain, budget_bytes) for budget_bytes in allowed]
    for solution, budget_bytes in zip(found, allowed):
        assert 0 < solution.states <= most_states
        assert solution.peak_bytes <= budget_bytes
    assert found[0].seconds > found[1].seconds > found[2].seconds


def test_spans_are_chosen_in_long_chains() -> None:
    chain = with_spans(100, random.Random(0))
    solution = solve(chain, budgets(chain)[0])
    assert {pick.stop - pick.start for pick in solution.picks} == {1, 4}
    assert solution.seconds < solve(Chain(chain.menus, chain.outside), budgets(chain)[0]).seconds


def test_the_last_blocks_steps_spare_work() -> None:
    """A hull of the last blocks' needs is far below the steps, where these decide."""
    chain = measured(100, random.Random(0))
    budget_bytes = budgets(chain)[0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bound, "_STEPS", 0)
        without = solve(chain, budget_bytes)
    assert solve(chain, budget_bytes) == without
    assert solve(chain, budget_bytes).states * 4 < without.states


def test_equal_blocks_have_a_frontier_of_counts() -> None:
    """A hundred blocks with the same menu of two: what counts is how many recompute."""
    chain = Chain(((KEEP, RECOMPUTE),) * 100, (0,) * 101)
    found = frontier(chain, limit=200)
    assert [solution.seconds for solution in found] == [float(99 - index) for index in range(100)]
    assert found[-1].states < 2000


# -- numbers ----------------------------------------------------------------------------------------------------------


def test_sums_of_seconds_are_exact() -> None:
    """The tenth of a float's last digit is what decides here: the floats' own sum would say that it is equal."""
    tiny = math.ulp(1.0) / 16
    blocks = (
        (Candidate("long", 1.0, 1, 1), Candidate("longer", 1.0 + 2 * tiny * 8, 0, 0)),
        *(((Candidate("tiny", tiny, 1, 1)),),) * 8,
    )
    chain = Chain(blocks, (0,) * 10)
    assert solve(chain, 100).picks[0].entry.name == "long"
    assert solve(chain, 100).seconds == math.fsum([1.0, *[tiny] * 8])


def test_the_smaller_peak_of_equally_fast_ones() -> None:
    assert solve(Chain(((BIG, SMALL),), (0, 0)), 100).picks[0].entry is SMALL


def test_a_chain_without_blocks() -> None:
    chain = Chain((), (7,))
    assert solve(chain, 7) == least(chain) == Solution((), 0.0, 7)
    assert frontier(chain) == [Solution((), 0.0, 7)]
    with pytest.raises(Infeasible):
        solve(chain, 6)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Chain(((KEEP,),), (0,)), "1 blocks was given 1 numbers.*give 2"),
        (lambda: Chain(((),), (0, 0)), "nothing to choose from for block 0"),
        (lambda: Chain(((KEEP,),), (0, 0), (Span(0, 2, (KEEP,)),)), "from 0 up to 2 .* chain of 1"),
        (lambda: Chain(((KEEP,),), (0, 0), (Span(0, 1, ()),)), "nothing to choose from for the span"),
        (lambda: Chain(((Candidate("odd", -1.0, 0, 0),),), (0, 0)), "'odd' of block 0 takes -1.0 seconds"),
        (lambda: Chain(((Candidate("odd", math.nan, 0, 0),),), (0, 0)), "takes nan seconds"),
        (lambda: Chain(((KEEP,),), (0, 2**62)), "below 2\\*\\*62"),
        (lambda: Chain(((KEEP,),), (0, 0)).peak_of(()), "end after 0 of 1 blocks"),
        (lambda: Chain(((KEEP,),), (0, 0)).peak_of([Pick(1, 2, KEEP)]), "from 1 up to 2 was given"),
        (lambda: frontier(Chain(((KEEP,),), (0, 0)), limit=1), "at most 1 solutions"),
    ],
)
def test_what_is_refused(make: Callable[[], object], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        make()

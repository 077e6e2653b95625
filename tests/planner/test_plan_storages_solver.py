"""The solver's two limits, memory and what a storage keeps, and the copies that it hides: against brute force."""

from __future__ import annotations

import random
from collections.abc import Callable
from fractions import Fraction
from itertools import pairwise, product
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from reactivate.planner import solve as solver
from reactivate.planner.solve import Chain, Infeasible, Option, Problem, Solution, Transfer

Draw = Callable[[Any], Any]
Options = tuple[Option, ...]


def solve(chain: Chain, budget_bytes: float) -> Solution:
    return Problem(chain, budget_bytes).solve(budget_bytes)


def least(chain: Chain) -> Solution:
    return Problem(chain).least()


times = st.integers(0, 12).map(lambda number: number / 4)
sizes = st.integers(0, 12)


@st.composite
def options(draw: Draw, index: int, moves: bool) -> Option:
    transfer = Transfer(draw(times), draw(times), draw(sizes)) if moves else None
    return Option(f"option {index}", draw(times), draw(sizes), draw(sizes), draw(times), draw(times), transfer)


@st.composite
def chains(draw: Draw, most: int = 4) -> Chain:
    """The first option of each menu moves nothing, as in a plan."""
    blocks = []
    for _ in range(draw(st.integers(1, most))):
        count = draw(st.integers(1, 3))
        blocks.append(tuple(draw(options(index, index > 0 and draw(st.booleans()))) for index in range(count)))
    outside = tuple(draw(sizes) for _ in range(len(blocks) + 1))
    limit = draw(st.one_of(st.none(), st.integers(0, 24)))
    return Chain(tuple(blocks), outside, limit, draw(st.integers(1, 2)))


def stored(choice: Options) -> int:
    return sum(option.transfer.stored_bytes for option in choice if option.transfer is not None)


def choices(chain: Chain) -> list[Options]:
    limit = chain.limit_bytes
    return [choice for choice in product(*chain.menus) if limit is None or stored(choice) <= limit]


@settings(max_examples=400, deadline=None)
@given(chains())
def test_what_brute_force_finds(chain: Chain) -> None:
    """The fastest for every budget at which anything changes, the least peak, and an error one byte below it."""
    solutions = [chain.solution_of(choice) for choice in choices(chain)]
    peaks = sorted({solution.peak_bytes for solution in solutions})
    for peak in peaks:
        found = solve(chain, peak)
        assert found.peak_bytes <= peak
        assert chain.limit_bytes is None or stored(found.options) <= chain.limit_bytes
        assert found.seconds == min(solution.seconds for solution in solutions if solution.peak_bytes <= peak)
    assert least(chain).peak_bytes == peaks[0]
    with pytest.raises(Infeasible):
        solve(chain, peaks[0] - 1)
    assert Problem(chain).least_bytes == peaks[0]


@settings(max_examples=200, deadline=None)
@given(chains(most=6), st.sampled_from([1, 5]))
def test_whatever_is_dropped_both_limits_are_held(chain: Chain, most: int) -> None:
    solutions = [chain.solution_of(choice) for choice in choices(chain)]
    smallest = min(solution.peak_bytes for solution in solutions)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(solver, "MOST_MOVING", most)
        for peak in {solution.peak_bytes for solution in solutions}:
            found = solve(chain, peak)
            assert found.peak_bytes <= peak
            assert chain.limit_bytes is None or stored(found.options) <= chain.limit_bytes
        assert least(chain).peak_bytes == smallest


def waited(choice: Options) -> Fraction:
    """Return what a step waits for copies, from its events in order; one block's tensors are on their way out at a time."""
    now = out = waiting = Fraction(0)
    for option in choice:
        if option.transfer is not None:
            waiting += max(Fraction(0), out - now)
            now = max(now, out)
            out = now + Fraction(option.transfer.out_seconds)
        now += Fraction(option.forward_seconds)
    moved = [index for index, option in enumerate(choice) if option.transfer is not None]
    back = dict.fromkeys(moved[-1:], now)  # the last ones stayed
    for index in reversed(range(len(choice))):
        if index in moved:
            waiting += max(Fraction(0), back[index] - now)
            now = max(now, back[index])
            before = moved[moved.index(index) - 1] if moved[0] != index else None
            if before is not None:
                back[before] = now + Fraction(choice[before].transfer.back_seconds)  # type: ignore[union-attr]
        now += Fraction(choice[index].backward_seconds)
    return waiting


@settings(max_examples=300, deadline=None)
@given(chains(most=6), st.randoms(use_true_random=False))
def test_what_is_waited_is_what_the_events_say(chain: Chain, rng: random.Random) -> None:
    choice = tuple(rng.choice(menu) for menu in chain.menus)
    alone = Chain(chain.menus, chain.outside)
    own = sum(Fraction(option.seconds) for option in choice)
    assert Fraction(alone.solution_of(choice).seconds) == own + waited(choice)


def test_every_other_block_moves_where_a_copy_takes_two() -> None:
    """Copies of neighbours would wait for one another; those of every other block are hidden."""
    recompute = Option("recompute", 1.0, 4, 6, 1.0, 2.0)
    move = Option("move", 1.0, 0, 6, 1.0, 2.0, Transfer(2.0, 4.0, 4))
    chain = Chain(((recompute, move),) * 8, (0,) * 9)
    found = solve(chain, 22)
    moved = [index for index, option in enumerate(found.options) if option is move]
    assert found.seconds == 8.0 and len(moved) == 4 and all(b - a >= 2 for a, b in pairwise(moved))


def test_a_limit_that_leaves_room_for_some() -> None:
    keep, move = Option("keep", 0.0, 4, 5), Option("move", 1.0, 0, 5, transfer=Transfer(0.0, 0.0, 4))
    chain = Chain(((keep, move),) * 5, (0,) * 6, limit_bytes=11)
    assert least(chain).peak_bytes == 5 + 2 * 4  # of four below the last only two fit into the storage
    assert stored(least(chain).options) == 8
    assert least(Chain(chain.menus, chain.outside)).peak_bytes == 5


def long_chain(count: int, rng: random.Random) -> Chain:
    blocks = []
    for _ in range(count):
        size, time = rng.randrange(2**20, 2**24), rng.uniform(0.5, 2)
        menu = [Option("keep", 0.0, 6 * size, 7 * size, time, 2 * time)]
        for index in range(8):
            share = rng.random()
            extra = time * (1 - share) * rng.uniform(0.5, 1.5)
            held = int(6 * size * share)
            transfer = None if index % 2 else Transfer(size * rng.uniform(0.5, 4) / 2**23, size / 2**23, size)
            menu.append(Option(str(index), extra, 0 if transfer else held, 7 * size, time, 2 * time + extra, transfer))
        blocks.append(tuple(menu))
    return Chain(tuple(blocks), (0,) * count + (2**22,), limit_bytes=count * 2**21)


def test_long_chains_are_within_both_limits_and_faster_with_more_memory() -> None:
    chain = long_chain(40, random.Random(0))
    low = least(chain).peak_bytes
    found = [solve(chain, low * tenths // 10) for tenths in (10, 15, 25, 60)]
    assert [solution.seconds for solution in found] == sorted((one.seconds for one in found), reverse=True)
    for solution in found:
        assert chain.limit_bytes is not None and stored(solution.options) <= chain.limit_bytes
    points = Problem(chain).frontier(limit=4)
    assert points[0].peak_bytes == low and len(points) > 2


@pytest.mark.parametrize("seed", range(3))
def test_little_is_lost_by_dropping(seed: int) -> None:
    """Beside a solver that drops next to nothing: within 2 % of the time that the smallest choice adds."""
    chain = long_chain(9, random.Random(seed))
    low, slowest = least(chain).peak_bytes, least(chain).seconds
    for tenths in (12, 20):
        found = solve(chain, low * tenths // 10)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(solver, "MOST_MOVING", 1000)
            best = solve(chain, low * tenths // 10)
        assert best.seconds - 1e-9 <= found.seconds + 0.02 * slowest and found.seconds <= best.seconds + 0.02 * slowest

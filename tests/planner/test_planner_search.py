"""A plan is what a simulated step holds, whatever the table of candidates says."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given, settings, strategies as st
from torch import nn

from reactivate.planner.candidates import FULL, KEEP, Candidate
from reactivate.planner.search import Search
from reactivate.planner.table import CallSummary, CandidateTable, TraceSummary
from reactivate.planner.trace.records import Op, Trace

MENU = (KEEP, FULL, Candidate("half", ("part",)))
HELD = {"keep": 100, "recompute": 10, "half": 50}
NEED = {"keep": 110, "recompute": 120, "half": 115}
SECONDS = {"keep": 1.0, "recompute": 2.0, "half": 1.4}


class World:
    """A model of blocks whose true figures are those of the table plus what the table does not know."""

    def __init__(self, unknown: list[int]) -> None:
        self.unknown = unknown
        self.paths = tuple(f"blocks.{number}" for number in range(len(unknown)))
        self.simulated = 0
        menus = dict.fromkeys(self.paths, MENU)
        table = CandidateTable(
            self.reading(dict.fromkeys(self.paths, KEEP), is_true=False), dict.fromkeys(self.paths, nn.ReLU())
        )
        for candidate in MENU[1:]:
            candidates = dict.fromkeys(self.paths, candidate)
            table.enter(self.reading(candidates, is_true=False), candidates)
        self.search = Search(table, menus, self.simulate, 0.0)

    def reading(self, candidates: Mapping[str, Candidate], *, is_true: bool) -> TraceSummary:
        calls = []
        for path, unknown in zip(self.paths, self.unknown):
            name = candidates[path].name
            need = NEED[name] + (unknown if is_true and name != "keep" else 0)
            calls.append(CallSummary(HELD[name], need, SECONDS[name]))
        outside = (0,) * len(self.paths) + (5,)
        return TraceSummary(self.paths, tuple(calls), outside, self.paths)

    @staticmethod
    def peak_of(reading: TraceSummary) -> int:
        held = [sum(call.held_bytes for call in reading.calls[:number]) for number in range(len(reading.calls) + 1)]
        needs = [before + call.need_bytes for before, call in zip(held, reading.calls)]
        return max(*needs, held[-1] + reading.outside_bytes[-1])

    def simulate(self, candidates: Mapping[str, Candidate]) -> tuple[Trace, TraceSummary]:
        self.simulated += 1
        reading = self.reading(candidates, is_true=True)
        return Trace([Op(0, 0, False, False, 0, self.peak_of(reading), 0, 0.0)]), reading


def test_a_table_that_is_right_needs_one_simulation() -> None:
    world = World([0, 0, 0, 0])
    found = world.search.fit(250)
    assert found is not None and found.trace.peak_bytes <= 250
    assert world.simulated == found.rounds == 1
    assert found.trace.peak_bytes == found.solution.peak_bytes


def test_a_table_that_promises_too_much_is_corrected() -> None:
    world = World([0, 0, 60, 0])
    found = world.search.fit(220)
    assert found is not None and found.trace.peak_bytes <= 220
    assert found.rounds == world.simulated > 1


def test_where_nothing_holds_nothing_is_returned() -> None:
    world = World([0, 0, 0, 500])
    assert world.search.fit(130) is None
    least = world.search.smallest().trace.peak_bytes
    assert least > 130
    assert world.search.fit(least) is not None
    assert world.search.fit(least - 1) is None


@settings(max_examples=60, deadline=None)
@given(
    unknown=st.lists(st.integers(-30, 60), min_size=1, max_size=6),
    budget=st.integers(100, 700),
)
def test_what_is_returned_holds_and_the_least_is_the_least(unknown: list[int], budget: int) -> None:
    world = World(unknown)
    found = world.search.fit(budget)
    least = world.search.smallest().trace.peak_bytes
    if found is None:
        assert least > budget
    else:
        assert found.trace.peak_bytes <= budget
        assert world.peak_of(world.reading(found.candidates, is_true=True)) == found.trace.peak_bytes
    again = World(unknown)
    assert again.search.smallest().trace.peak_bytes == least  # whatever was looked for before


def test_a_choice_is_simulated_once() -> None:
    world = World([0, 0])
    for _ in range(3):
        world.search.fit(150)
    assert world.simulated == 1


@pytest.mark.parametrize("count", [1, 5])
def test_the_least_of_a_right_table(count: int) -> None:
    world = World([0] * count)
    smallest = world.search.smallest()
    assert smallest.trace.peak_bytes == smallest.solution.peak_bytes
    with_full = world.peak_of(world.reading(dict.fromkeys(world.paths, FULL), is_true=True))
    assert smallest.trace.peak_bytes <= with_full

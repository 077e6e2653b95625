"""Candidates that save single calls by value: seconds of recomputation saved for each byte held.

A recomputation makes every call that is not saved, in order, up to the last one whose results are needed. So a call is
worth its own time and not that of the calls before it; these are saved as well, or are made. What follows the last needed
tensor is free, and its results are not kept: whether that is much depends on what else is saved, and so does the worth of
a call.

The knapsack of `torch.compile`'s `activation_memory_budget` ranks ops; this ranks calls, as the engine saves them.
Choices grow by one call at a time, the one that saves the most for each byte beside those that are saved already
(Dantzig, "Discrete-variable extremum problems", Operations Research 5, 1957). A few of them become candidates: those that
lie furthest below the line between their neighbors, since the solver mixes neighbors among the blocks of a model as a
line does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import NamedTuple

from torch.nn import Module

from reactivate.planner.candidates import FULL, CallName, Candidate, list_candidates
from reactivate.planner.table import CandidateTable, block_class

MOST_WORK = 2_000_000  # looks at calls: of a unit with more of them, only the longest are ranked
MOST_CHOICES = 6  # of a unit, that become candidates
LEAST_GAIN = 0.01  # of the unit's recomputation: a choice that is nearer to the line is left out


@dataclass(frozen=True)
class RecordedCall:
    """A call, as a forward pass showed it. Memory is bytes by the number of each.

    Attributes:
        name: the call; calls of one name are saved or made together.
        seconds: of its ops.
        saved: what autograd saves of it that its arguments do not give.
        results: the memory of what it returns.
        needs_arguments: whether its backward needs anything that its arguments give.
        reason: why it cannot be saved; "" if it can.
    """

    name: CallName
    seconds: float
    saved: Mapping[int, int] = field(default_factory=dict)
    results: Mapping[int, int] = field(default_factory=dict)
    needs_arguments: bool = False
    reason: str = ""

    def without(self, kept: Collection[int]) -> RecordedCall:
        """Return the call without the memory with these numbers, which is kept anyway."""
        saved, results = (
            {number: 0 if number in kept else size for number, size in memory.items()}
            for memory in (self.saved, self.results)
        )
        return replace(self, saved=saved, results=results)


class SavedCosts(NamedTuple):
    """The bytes that saved calls keep, and the seconds that the others take once more."""

    held_bytes: int
    seconds: float


class SavedCalls:
    """Some calls of a unit that are saved: their costs, and the worth of each further one beside them.

    Args:
        calls: of the unit, in order.
        names: those that are saved; names that `calls` do not have, and calls that cannot be saved, do not matter.

    Examples:
        >>> from reactivate.planner.call_values import RecordedCall, SavedCalls
        >>> from reactivate.planner.candidates import CallName
        >>> up = RecordedCall(CallName("up"), 3.0, {}, {0: 8}, needs_arguments=True)
        >>> gelu = RecordedCall(CallName("gelu"), 1.0, {}, {1: 8}, needs_arguments=True)
        >>> down = RecordedCall(CallName("down"), 3.0, {}, {2: 2}, needs_arguments=True)
        >>> calls = [up, gelu, down]
        >>> SavedCalls(calls, {up.name}).costs, SavedCalls(calls, {up.name, gelu.name}).costs
        (SavedCosts(held_bytes=8, seconds=1.0), SavedCosts(held_bytes=16, seconds=0.0))
    """

    def __init__(self, calls: Sequence[RecordedCall], names: Collection[CallName]) -> None:
        self.names = frozenset(names)
        self._calls = calls
        kept = [call.name in self.names and not call.reason for call in calls]
        self._end, self._runs = _end_of(calls, kept)
        self._memory: dict[int, int] = {}
        self._others: dict[CallName, list[int]] = {}
        made = []
        for index, (call, is_kept) in enumerate(zip(calls, kept)):
            if is_kept:
                self._memory.update(call.saved)
                if index < self._end:
                    self._memory.update(call.results)
                continue
            if index < self._end or (index == self._end and self._runs):
                made.append(call.seconds)
            if not call.reason:
                self._others.setdefault(call.name, []).append(index)
        self.costs = SavedCosts(sum(self._memory.values()), math.fsum(made))

    def rank(self, name: CallName) -> float:
        """Return the seconds that a further call saves for each byte, negative: less is better."""
        own = self._others[name]
        if self._runs and self._end in own:  # then nothing may need it, nor what is saved behind
            then = SavedCalls(self._calls, self.names | {name}).costs
            return (then.seconds - self.costs.seconds) / max(1, then.held_bytes - self.costs.held_bytes)
        memory: dict[int, int] = {}
        seconds = []
        for index in own:
            call = self._calls[index]
            memory.update(call.saved)
            if index < self._end:
                memory.update(call.results)
                seconds.append(call.seconds)
        held_bytes = sum(size for number, size in memory.items() if number not in self._memory)
        return -math.fsum(seconds) / max(1, held_bytes)


def _end_of(calls: Sequence[RecordedCall], kept: Sequence[bool]) -> tuple[int, bool]:
    """Return the last call whose results are needed, -1 if there is none, and whether it is made itself."""
    for index in range(len(calls) - 1, -1, -1):
        call = calls[index]
        if call.saved and not kept[index]:
            return index, True
        if call.needs_arguments:
            return index, False
    return -1, False


# -- a few good choices -----------------------------------------------------------------------------------------------


def ranked(calls: Sequence[RecordedCall]) -> list[SavedCalls]:
    """List choices of calls to save, each with one more than the one before, from none on."""
    seconds: dict[CallName, float] = {}
    for call in calls:
        if not call.reason and (call.saved or call.results):
            seconds[call.name] = seconds.get(call.name, 0.0) + call.seconds
    most = math.isqrt(MOST_WORK // max(1, len(calls)))
    left = sorted(seconds, key=lambda name: (-seconds[name], name))[:most]
    found = [SavedCalls(calls, ())]
    while left:  # all are ranked again, since a call may be worth more beside another: at the end of the unit
        name = min(left, key=found[-1].rank)
        left.remove(name)
        found.append(SavedCalls(calls, found[-1].names | {name}))
    return found


def best_choices(
    calls: Sequence[RecordedCall], keep_bytes: int, others: Iterable[Collection[CallName]] = ()
) -> list[SavedCalls]:
    """Return the few choices that help the most beside those that a plan has anyway, the smallest first.

    Args:
        calls: of the unit, in order.
        keep_bytes: what the unit holds where nothing is recomputed, above what it does where everything is.
        others: what other candidates save.
    """
    path = ranked(calls)
    whole = path[0].costs.seconds
    line = _hull([path[0].costs, SavedCosts(keep_bytes, 0.0), *(SavedCalls(calls, names).costs for names in others)])
    left = [choice for choice in path[1:] if choice.costs.held_bytes < keep_bytes]
    chosen: list[SavedCalls] = []
    while left and len(chosen) < MOST_CHOICES:
        best = max(left, key=lambda choice: _gain(line, choice.costs))
        if _gain(line, best.costs) <= LEAST_GAIN * whole:
            break
        chosen.append(best)
        left.remove(best)
        line = _hull([*line, best.costs])
    return sorted(chosen, key=lambda choice: choice.costs)


def _gain(line: Sequence[SavedCosts], point: SavedCosts) -> float:
    """Return by how many seconds a point lies below a line."""
    for one, two in pairwise(line):
        if one.held_bytes <= point.held_bytes <= two.held_bytes:
            share = (point.held_bytes - one.held_bytes) / max(1, two.held_bytes - one.held_bytes)
            return one.seconds + share * (two.seconds - one.seconds) - point.seconds
    return 0.0


def _hull(points: Iterable[SavedCosts]) -> list[SavedCosts]:
    """Return the corners of the line below all points: in more bytes less time, ever more slowly."""
    found: list[SavedCosts] = []
    for point in sorted(points):
        if found and point.seconds >= found[-1].seconds:
            continue
        while len(found) > 1 and _is_above(found[-2], found[-1], point):
            found.pop()
        found.append(point)
    return found


def _is_above(one: SavedCosts, middle: SavedCosts, two: SavedCosts) -> bool:
    """Return whether the middle point lies on or above the line from one to the other."""
    fall = (one.seconds - middle.seconds) * (two.held_bytes - one.held_bytes)
    return fall <= (one.seconds - two.seconds) * (middle.held_bytes - one.held_bytes)


# -- menus ------------------------------------------------------------------------------------------------------------

Record = Callable[[Mapping[str, Collection[str]]], Mapping[str, Sequence[RecordedCall]]]


def make_menus(
    units: Mapping[str, Module], functions: Mapping[str, Collection[str]], table: CandidateTable, record: Record
) -> dict[str, tuple[Candidate, ...]]:
    """Return the candidates of each unit: fixed ones, and those by value. Equal units have the same.

    Args:
        units, functions: those that are called, by their paths, and the functions that they call.
        table: has the plain step, and what it holds where every unit is recomputed.
        record: returns the calls of units, given the functions that these call.
    """
    firsts: dict[object, str] = {}  # of those that can be recomputed
    for path, unit in units.items():
        if table.allows(path, FULL):
            firsts.setdefault(block_class(unit), path)
    fixed = {path: list_candidates(unit, frozenset(functions[path])) for path, unit in units.items()}
    calls = record({path: functions[path] for path in firsts.values()})
    added: dict[object, dict[Candidate, SavedCosts]] = {}
    for kind, path in firsts.items():
        change, count = table.change(path, FULL), table.plain.treated.count(path)
        keep_bytes = 0 if change is None else -change.held_bytes // count  # of one call, as `calls` are
        added[kind] = _by_value(fixed[path], calls.get(path, ()), keep_bytes)
    found = {}
    for path, unit in units.items():
        kind = block_class(unit)
        own, by_value = calls.get(firsts.get(kind, path), ()), added.get(kind, {})
        left = (item for item in fixed[path] if not (_saves_calls(item) and _is_beaten(item, own, by_value)))
        found[path] = (*left, *by_value)
    return found


def _by_value(
    fixed: Iterable[Candidate], calls: Sequence[RecordedCall], keep_bytes: int
) -> dict[Candidate, SavedCosts]:
    """Find the candidates by value that help the most beside fixed ones, with their costs."""
    others = [_saved_by(item, calls) for item in fixed if _saves_calls(item)]
    count = len({call.name for call in calls if not call.reason})
    return {
        saving_candidate(choice.names, f"recompute but {len(choice.names)} of {count} calls"): choice.costs
        for choice in best_choices(calls, keep_bytes, others)
    }


def _is_beaten(item: Candidate, calls: Sequence[RecordedCall], by_value: Mapping[Candidate, SavedCosts]) -> bool:
    """Return whether a fixed candidate is no smaller and no faster than one by value."""
    costs = SavedCalls(calls, _saved_by(item, calls)).costs
    return any(
        other.held_bytes <= costs.held_bytes and other.seconds <= costs.seconds
        for candidate, other in by_value.items()
        if item.sees_functions or not candidate.sees_functions
    )


def _saves_calls(candidate: Candidate) -> bool:
    return candidate.recompute == ("",) and candidate.saves


def _saved_by(candidate: Candidate, calls: Sequence[RecordedCall]) -> frozenset[CallName]:
    return frozenset(
        call.name
        for call in calls
        if (call.name.op in candidate.save_ops if call.name.op else call.name.path in candidate.save_modules)
    )


def saving_candidate(saved: Collection[CallName], name: str) -> Candidate:
    """Return the candidate that recomputes a unit but for these calls."""
    functions = tuple(sorted(call for call in saved if call.op))
    modules = tuple(sorted(call.path for call in saved if not call.op))
    return Candidate(name, ("",), modules, save_calls=functions)

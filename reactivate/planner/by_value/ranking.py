"""The calls of a unit by value: seconds of recomputation saved for each byte held. No torch.

The knapsack of `torch.compile`'s `activation_memory_budget` ranks ops; this ranks calls, as the engine saves them. Choices
grow by one call at a time, the one that saves the most for each byte beside those that are saved already (Dantzig,
"Discrete-variable extremum problems", Operations Research 5, 1957). A few of them go into the plan: those that lie furthest
below the line between their neighbours, since the solver mixes neighbours among the blocks of a model as a line does.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

from reactivate.planner.by_value.call_costs import CallCosts, RecordedCall, costs_of, end_of, memory_of
from reactivate.planner.by_value.call_names import CallName

MOST_WORK = 2_000_000  # looks at calls: of a unit with more of them, only the longest are ranked
MOST_CHOICES = 6  # of a unit, that go into the plan
LEAST_GAIN = 0.01  # of the unit's recomputation: a choice that is nearer to the line is left out


class CallChoice(NamedTuple):
    """Some calls that are saved.

    Attributes:
        saved: their names.
        costs: what that costs.
    """

    saved: frozenset[CallName]
    costs: CallCosts


def ranked(calls: Sequence[RecordedCall]) -> list[CallChoice]:
    """List choices of calls to save, each with one more than the one before, from none on."""
    now = _Growing(calls, frozenset())
    found = [CallChoice(now.saved, now.costs)]
    left = _worthwhile(calls)
    while left:  # all are ranked again, since a call may be worth more beside another: at the end of the unit
        name = min(left, key=now.rank)
        left.remove(name)
        now = _Growing(calls, now.saved | {name})
        found.append(CallChoice(now.saved, now.costs))
    return found


def _worthwhile(calls: Sequence[RecordedCall]) -> list[CallName]:
    seconds: dict[CallName, float] = {}
    for call in calls:
        if not call.reason and (call.saved or call.results):
            seconds[call.name] = seconds.get(call.name, 0.0) + call.seconds
    most = math.isqrt(MOST_WORK // max(1, len(calls)))
    return sorted(seconds, key=lambda name: (-seconds[name], name))[:most]


class _Growing:
    """Some calls that are saved, and the worth of each further one beside them.

    Args:
        calls: of the unit, in order.
        saved: the names of those that are saved.
    """

    def __init__(self, calls: Sequence[RecordedCall], saved: frozenset[CallName]) -> None:
        self.saved = saved
        self._calls = calls
        kept = [call.name in saved and not call.reason for call in calls]
        self._end, self._runs = end_of(calls, kept)
        self.costs = costs_of(calls, saved)
        self._memory = memory_of(calls, kept, self._end)
        self._others: dict[CallName, list[int]] = {}
        for index, (call, is_kept) in enumerate(zip(calls, kept)):
            if not is_kept and not call.reason:
                self._others.setdefault(call.name, []).append(index)

    def rank(self, name: CallName) -> float:
        """Return the seconds that a call saves for each byte, less being better."""
        own = self._others[name]
        if self._runs and self._end in own:  # nobody may wait for it then, nor for what is saved behind
            then = costs_of(self._calls, self.saved | {name})
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


def best_choices(
    calls: Sequence[RecordedCall], keep_bytes: int, others: Iterable[Iterable[CallName]] = ()
) -> list[CallChoice]:
    """Return the few choices that help the most beside those that a plan has anyway, the smallest first.

    Args:
        calls: of the unit, in order.
        keep_bytes: what the unit holds where nothing is recomputed, above what it does where everything is.
        others: what other treatments save.
    """
    path = ranked(calls)
    whole = path[0].costs.seconds
    line = _hull([path[0].costs, CallCosts(keep_bytes, 0.0), *(costs_of(calls, frozenset(names)) for names in others)])
    left = [choice for choice in path[1:] if choice.costs.held_bytes < keep_bytes]
    chosen: list[CallChoice] = []
    while left and len(chosen) < MOST_CHOICES:
        best = max(left, key=lambda choice: _gain(line, choice.costs))
        if _gain(line, best.costs) <= LEAST_GAIN * whole:
            break
        chosen.append(best)
        left.remove(best)
        line = _hull([*line, best.costs])
    return sorted(chosen, key=lambda choice: choice.costs)


def _gain(line: Sequence[CallCosts], point: CallCosts) -> float:
    """Return by how many seconds a point lies below a line."""
    for one, two in pairwise(line):
        if one.held_bytes <= point.held_bytes <= two.held_bytes:
            share = (point.held_bytes - one.held_bytes) / max(1, two.held_bytes - one.held_bytes)
            return one.seconds + share * (two.seconds - one.seconds) - point.seconds
    return 0.0


def _hull(points: Iterable[CallCosts]) -> list[CallCosts]:
    """Return the corners of the line below all points: in more bytes less time, ever more slowly."""
    found: list[CallCosts] = []
    for point in sorted(points):
        if found and point.seconds >= found[-1].seconds:
            continue
        while len(found) > 1 and _is_above(found[-2], found[-1], point):
            found.pop()
        found.append(point)
    return found


def _is_above(one: CallCosts, middle: CallCosts, two: CallCosts) -> bool:
    """Return whether the middle point lies on or above the line from one to the other."""
    fall = (one.seconds - middle.seconds) * (two.held_bytes - one.held_bytes)
    return fall <= (one.seconds - two.seconds) * (middle.held_bytes - one.held_bytes)

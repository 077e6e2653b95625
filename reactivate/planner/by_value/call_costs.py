"""The bytes and seconds of saving some of a unit's calls and recomputing the others. No torch.

A recomputation makes every call that is not saved, in order, up to the last one that somebody waits for. So a call is worth
its own time and not that of the calls before it; these are saved as well, or are made. What follows the last needed tensor is
free, and its results are not kept: whether that is much depends on what else is saved, and so does the worth of a call.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from reactivate.planner.by_value.call_names import CallName


@dataclass(frozen=True)
class RecordedCall:
    """A call, as a forward pass showed it.

    Attributes:
        name: the call; calls of one name are saved or made together.
        seconds: what its ops take.
        saved: what autograd saves of it that its arguments do not give, masks as bits: the bytes of each memory, by a number.
        results: the memory of what it returns, in the same way.
        needs_arguments: whether its backward needs anything that its arguments give.
        reason: why it cannot be saved; "" if it can.
    """

    name: CallName
    seconds: float
    saved: Mapping[int, int] = field(default_factory=dict)
    results: Mapping[int, int] = field(default_factory=dict)
    needs_arguments: bool = False
    reason: str = ""

    def without(self, there: Collection[int]) -> RecordedCall:
        """Return the call without what some memory keeps that is there anyway.

        Args:
            there: the numbers of that memory.
        """
        saved, results = (
            {number: size if number not in there else 0 for number, size in memory.items()}
            for memory in (self.saved, self.results)
        )
        return replace(self, saved=saved, results=results)


class CallCosts(NamedTuple):
    """The costs of a choice.

    Attributes:
        held_bytes: what the saved calls keep.
        seconds: what the others take once more.
    """

    held_bytes: int
    seconds: float


def costs_of(calls: Sequence[RecordedCall], saved: Collection[CallName]) -> CallCosts:
    """Return what it costs to save these calls.

    Args:
        calls: of the unit, in order.
        saved: the names of those that are saved; others than `calls` have do not matter.

    Examples:
        >>> from reactivate.planner.by_value.call_costs import RecordedCall, costs_of
        >>> from reactivate.planner.by_value.call_names import CallName
        >>> up = RecordedCall(CallName("up"), 3.0, {}, {0: 8}, needs_arguments=True)
        >>> gelu = RecordedCall(CallName("gelu"), 1.0, {}, {1: 8}, needs_arguments=True)
        >>> down = RecordedCall(CallName("down"), 3.0, {}, {2: 2}, needs_arguments=True)
        >>> costs_of([up, gelu, down], [up.name]), costs_of([up, gelu, down], [up.name, gelu.name])
        (CallCosts(held_bytes=8, seconds=1.0), CallCosts(held_bytes=16, seconds=0.0))
    """
    kept = [call.name in saved and not call.reason for call in calls]
    end, runs = end_of(calls, kept)
    made = (call for index, call in enumerate(calls) if not kept[index] and (index < end or (index == end and runs)))
    seconds = math.fsum(call.seconds for call in made)
    return CallCosts(sum(memory_of(calls, kept, end).values()), seconds)


def memory_of(calls: Sequence[RecordedCall], kept: Sequence[bool], end: int) -> dict[int, int]:
    """Return the bytes of each memory that saved calls keep, by its number.

    Args:
        calls: of the unit, in order.
        kept: whether each is saved.
        end: the last call that somebody waits for: results of it and of those behind are not kept.
    """
    memory: dict[int, int] = {}
    for index, (call, is_kept) in enumerate(zip(calls, kept)):
        if is_kept:
            memory.update(call.saved)
            if index < end:
                memory.update(call.results)
    return memory


def end_of(calls: Sequence[RecordedCall], kept: Sequence[bool]) -> tuple[int, bool]:
    """Return the last call that somebody waits for, -1 if there is none, and whether it is made itself."""
    for index in range(len(calls) - 1, -1, -1):
        call = calls[index]
        if call.saved and not kept[index]:
            return index, True
        if call.needs_arguments:
            return index, False
    return -1, False

"""The copies of a step on its clock: when each begins and ends, and how long the step waits for them.

Copies in one direction run one after the other, beside what computes. The step waits where it needs the memory of a tensor
whose copy is not done, or the tensor itself.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from reactivate.planner.cost.links import Link
from reactivate.planner.cost.prediction import Copy
from reactivate.planner.profile.trace import CopyEvent, Trace


@dataclass(frozen=True)
class Flow:
    """The copies of a step.

    Attributes:
        copies: each of them, in the order in which they begin.
        waits: {number of an op: how long the step waits before it, in seconds}.
        stored_bytes: the most that the storage keeps.
    """

    copies: tuple[Copy, ...] = ()
    waits: dict[int, float] | None = None
    stored_bytes: int = 0

    @property
    def waited_seconds(self) -> float:
        """Return how long the step waits for copies."""
        return sum((self.waits or {}).values())


def flow_of(trace: Trace, link: Link | None, scale: float, *, is_awaited: bool) -> Flow:
    """Return the copies of a simulated step.

    Args:
        trace: the step.
        link: how fast they are; None if there are none.
        scale: from the seconds of its ops to those of the step.
        is_awaited: whether the program itself waits for each copy.
    """
    if link is None or not trace.moves:
        return Flow()
    clock = _Clock(link, is_awaited)
    moves: defaultdict[int, list[CopyEvent]] = defaultdict(list)
    for move in trace.moves:
        moves[move.op].append(move)
    for number in range(len(trace.ops) + 1):
        before = clock.now
        for move in moves.get(number, ()):
            clock.pass_move(move)
        if clock.now > before:
            clock.waits[number] = clock.now - before
        if number < len(trace.ops):
            clock.now += scale * trace.ops[number].seconds
    return Flow(tuple(clock.copies), clock.waits, trace.stored_bytes)


class _Clock:
    """The time of the step, and of the copies in both directions."""

    def __init__(self, link: Link, is_awaited: bool) -> None:
        self.now = 0.0
        self.copies: list[Copy] = []
        self.waits: dict[int, float] = {}
        self._link = link
        self._is_awaited = is_awaited
        self._out_ends = self._back_ends = 0.0  # of the last copy in each direction
        self._sent: dict[int, float] = {}
        self._fetched: dict[int, float] = {}

    def pass_move(self, move: CopyEvent) -> None:
        """Go on to where a transfer has come that far."""
        if move.what == "sent":
            begin = max(self.now, self._out_ends)
            self._out_ends = self._sent[move.key] = begin + self._link.out_seconds(move.nbytes)
            self.copies.append(Copy(begin, self._out_ends, move.nbytes, is_back=False))
            if self._is_awaited:
                self.now = self._out_ends
        elif move.what == "fetched":
            begin = max(self.now, self._back_ends, self._sent.get(move.key, 0.0))
            self._back_ends = self._fetched[move.key] = begin + self._link.back_seconds(move.nbytes)
            self.copies.append(Copy(begin, self._back_ends, move.nbytes, is_back=True))
        elif move.what == "settled":
            self.now = max(self.now, self._sent[move.key])
        elif move.what == "read":
            self.now = max(self.now, self._fetched[move.key])

"""Chains whose blocks may move tensors to a storage: the fastest choice that fits both the memory and the storage.

A partial choice has more to it here than in `solve`: beside what it holds, what the storage keeps by it, and which copies
are not done when its last block ends. It is dropped

1. if it cannot be completed. For each block the choices of what comes after it are known by what they need of the memory
   and what they put into the storage, as far as none is better in both;
2. if another one holds no more, stores no more, and is no slower even if it waits for all that it has more of to be copied;
3. where more than `_MOST` are left: of each of `_RANGES` equal ranges of held bytes the fastest goes on, the one that has the
   least to wait for, and the one that stores least.

Both limits are held to the byte, whatever is dropped: what goes on can be completed. The fastest choice is found as long as
nothing is dropped by the third rule.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from typing import NamedTuple

from reactivate.planner.solver.chain import Candidate, Chain, Infeasible, Queue, Solution, copies_of, passed, ticks_of

_MOST = 400
_RANGES = 100
_ENDINGS = 400  # ways to complete a partial choice that are known of each block


class _Option(NamedTuple):
    """An entry of a block; times are in ticks."""

    held: int
    stored: int
    ticks: int
    need: int
    forward: int
    backward: int
    copies: tuple[int, int] | None
    entry: Candidate


class _Partial(NamedTuple):
    """A choice for the blocks so far, and how it was made: from which partial choice before, by which move."""

    held: int
    stored: int
    ticks: int
    peak: int
    queue: Queue
    before: int
    number: int


class _Ending(NamedTuple):
    """A way to choose for all that comes after a block: what it stores, and the memory that it needs."""

    stored: int
    need: int


@dataclass(frozen=True)
class MovingProblem:
    """A chain, made ready to be solved for any budget.

    Attributes:
        chain: the chain.
        moves: for each block those that are worth a choice.
        endings: for the beginning and after each block, those that are worth it: the more they store, the less they need.
    """

    chain: Chain
    moves: list[list[_Option]]
    endings: list[list[_Ending]]

    @classmethod
    def of(cls, chain: Chain) -> MovingProblem:
        if chain.limit_bytes is not None and _most_stored(chain) <= chain.limit_bytes:
            chain = replace(chain, limit_bytes=None)  # no choice comes to it
        limit = math.inf if chain.limit_bytes is None else chain.limit_bytes
        moves = [
            _worthwhile(_move_of(entry, *outside, is_limited=chain.limit_bytes is not None) for entry in menu)
            for menu, outside in zip(chain.menus, pairwise(chain.outside))
        ]
        endings = [[_Ending(0, chain.outside[-1])]]
        for row in reversed(moves):
            endings.append(_endings_of(row, endings[-1], limit))
        return cls(chain, moves, endings[::-1])

    @property
    def smallest_bytes(self) -> int:
        """Return the smallest peak."""
        return self.endings[0][-1].need

    def solve(self, budget_bytes: float) -> Solution:
        """Find the fastest solution within the budget, whose tensors fit into the storage.

        Raises:
            Infeasible: there is none.
        """
        if budget_bytes < self.smallest_bytes:
            raise Infeasible(self.smallest_bytes)
        rows = [[_Partial(0, 0, 0, self.chain.outside[0], Queue(), 0, 0)]]
        for moves, endings in zip(self.moves, self.endings[1:]):
            rows.append(_undominated(_thinned(self._continued(rows[-1], moves, endings, budget_bytes))))
        best = min(rows[-1], key=lambda partial: (partial.ticks, partial.peak))
        entries = []
        for moves, row in zip(reversed(self.moves), reversed(rows[:-1])):
            entries.append(moves[best.number].entry)
            best = row[best.before]
        solution = self.chain.solution_of(reversed(entries))
        limit = self.chain.limit_bytes
        assert solution.peak_bytes <= budget_bytes
        assert limit is None or solution.stored_bytes <= limit
        return solution

    def _continued(
        self, row: Sequence[_Partial], moves: Sequence[_Option], endings: Sequence[_Ending], budget_bytes: float
    ) -> list[_Partial]:
        """Continue partial choices by a block, where it fits and what comes after it still can."""
        limit = math.inf if self.chain.limit_bytes is None else self.chain.limit_bytes
        stored_by = [ending.stored for ending in endings]
        found: list[_Partial] = []
        for before, partial in enumerate(row):
            for number, move in enumerate(moves):
                held, stored = partial.held + move.held, partial.stored + move.stored
                index = bisect_right(stored_by, limit - stored) - 1
                peak = max(partial.peak, partial.held + move.need)
                if index < 0 or max(peak, held + endings[index].need) > budget_bytes:
                    continue
                queue, waited = passed(partial.queue, move.forward, move.backward, move.copies, self.chain.in_flight)
                found.append(_Partial(held, stored, partial.ticks + move.ticks + waited, peak, queue, before, number))
        return found


def _most_stored(chain: Chain) -> int:
    """Return the most bytes that any choice puts into the storage."""
    return sum(
        max(0 if entry.transfer is None else entry.transfer.stored_bytes for entry in menu) for menu in chain.menus
    )


def _move_of(entry: Candidate, outside_before: int, outside_after: int, *, is_limited: bool) -> _Option:
    need = max(entry.need_bytes, outside_before, entry.held_bytes + outside_after)
    stored = entry.transfer.stored_bytes if is_limited and entry.transfer is not None else 0
    forward, backward = ticks_of(entry.forward_seconds), ticks_of(entry.backward_seconds)
    return _Option(entry.held_bytes, stored, ticks_of(entry.seconds), need, forward, backward, copies_of(entry), entry)


def _worthwhile(moves: Iterable[_Option]) -> list[_Option]:
    """Return the moves than which no other one is as good in every way."""
    found: list[_Option] = []
    for move in sorted(
        moves, key=lambda move: (move.held, move.stored, move.need, move.ticks, move.copies is not None)
    ):
        if not any(_is_as_good(other, move) for other in found):
            found.append(move)
    return found


def _is_as_good(move: _Option, other: _Option) -> bool:
    """Return whether nobody loses who has `move` in the place of `other`, which hides more of others' copies, perhaps."""
    if move.held > other.held or move.stored > other.stored or move.need > other.need:
        return False
    lost = max(0, other.forward - move.forward) + max(0, other.backward - move.backward)
    if move.copies is not None:
        if other.copies is None or move.copies[0] != other.copies[0]:
            return False
        lost += max(0, move.copies[1] - other.copies[1])
    return move.ticks + lost <= other.ticks


def _endings_of(moves: Sequence[_Option], after: Sequence[_Ending], limit: float) -> list[_Ending]:
    """Return what may come from a block on."""
    ways = sorted(
        _Ending(move.stored + ending.stored, max(move.need, move.held + ending.need))
        for move in moves
        for ending in after
        if move.stored + ending.stored <= limit
    )
    found: list[_Ending] = []
    for ending in ways:
        if not found or ending.need < found[-1].need:
            found.append(ending)
    if len(found) <= _ENDINGS:
        return found
    return [found[index * (len(found) - 1) // (_ENDINGS - 1)] for index in range(_ENDINGS)]


def _undominated(row: Iterable[_Partial]) -> list[_Partial]:
    """Return those than which no other one is as good, whatever comes."""
    found: list[_Partial] = []
    for partial in sorted(row):
        _held, stored, ticks, peak, queue, _, _ = partial
        for other in reversed(found):
            if other.stored <= stored:
                at_most = other.ticks + max(0, other.queue.out - queue.out) + max(0, other.queue.back - queue.back)
                if at_most < ticks or (at_most == ticks and other.peak <= peak):
                    break
        else:
            found.append(partial)
    return found


def _thinned(row: list[_Partial]) -> list[_Partial]:
    """Keep some of each range of held bytes."""
    if len(row) <= _MOST:
        return row
    row.sort()
    low = row[0].held
    width = (row[-1].held - low) // _RANGES + 1
    found = set()
    for _, group in groupby(row, key=lambda partial: (partial.held - low) // width):
        members = list(group)
        found |= {
            min(members, key=lambda partial: (partial.ticks, partial.held)),
            min(members, key=lambda partial: (partial.ticks + sum(partial.queue), partial.held)),
            min(members, key=lambda partial: (partial.stored, partial.ticks + sum(partial.queue))),
        }
    return list(found)

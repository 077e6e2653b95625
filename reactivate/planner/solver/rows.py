"""Partial choices of the solver: continued by a block, and thinned, thousands at a time in tensors.

Every sum and every comparison is exact. Times have more bits than a number of a tensor, so each is two numbers. Where
products of times and bytes are compared, floats say which ones are far from the smallest, and Python's integers decide among
the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

_LOW_BITS = 62
_LOW = (1 << _LOW_BITS) - 1
_ROUNDED = 1 + 2.0**-40  # floats of positive sums and products are nearer than that to them
_ANY = 1 << 62  # more bytes than there are


@dataclass(frozen=True)
class Times:
    """Times in ticks, in two parts: `high` times 2**62, and `low`, which is from 0 up to that."""

    high: Tensor
    low: Tensor

    @classmethod
    def of(cls, ticks: Sequence[int]) -> Times:
        return cls(_whole([item >> _LOW_BITS for item in ticks]), _whole([item & _LOW for item in ticks]))

    def __getitem__(self, index: Tensor) -> Times:
        return Times(self.high.index_select(0, index), self.low.index_select(0, index))

    def __add__(self, other: Times) -> Times:
        low = self.low + other.low
        return Times(self.high + other.high + (low >> _LOW_BITS), low & _LOW)

    def about(self) -> Tensor:
        """Return them as floats."""
        return self.high.double() * 2.0**_LOW_BITS + self.low.double()

    def exactly(self) -> list[int]:
        """Return them as integers."""
        return [(high << _LOW_BITS) + low for high, low in zip(self.high.tolist(), self.low.tolist())]


@dataclass(frozen=True)
class Moves:
    """The entries of a block: bytes that are held and needed, and times."""

    held: Tensor
    ticks: Times
    need: Tensor

    @classmethod
    def of(cls, held: Sequence[int], ticks: Sequence[int], need: Sequence[int]) -> Moves:
        return cls(_whole(held), Times.of(ticks), _whole(need))


@dataclass(frozen=True)
class Choices:
    """Choices for the blocks so far: those that hold less come first, and each takes less than all before it.

    Or as much, with a smaller peak.

    Attributes:
        held: bytes.
        ticks: times.
        peak: bytes.
        before: the index of the one in the row before that is continued.
        number: of the move by which it is.
    """

    held: Tensor
    ticks: Times
    peak: Tensor
    before: Tensor
    number: Tensor

    @classmethod
    def first(cls, peak_bytes: int) -> Choices:
        """Return the row before the first block."""
        nothing = _whole([0])
        return cls(nothing, Times.of([0]), _whole([peak_bytes]), nothing, nothing)

    @classmethod
    def joined(cls, rows: Sequence[Choices]) -> Choices:
        """Return the choices of several rows, those that hold less first, but for most that take longer than one before."""
        held, order = _joined([row.held for row in rows]).sort(stable=True)
        ticks = Times(_joined([row.ticks.high for row in rows]), _joined([row.ticks.low for row in rows]))
        if len(held):
            about = ticks.about().index_select(0, order)
            left = (about <= about.cummin(0).values * _ROUNDED).nonzero().flatten()
            held, order = held.index_select(0, left), order.index_select(0, left)
        peak, before, number = (
            _joined([getattr(row, name) for row in rows]).index_select(0, order)
            for name in ("peak", "before", "number")
        )
        return cls(held, ticks[order], peak, before, number)

    def __len__(self) -> int:
        return len(self.held)

    def __getitem__(self, index: Tensor) -> Choices:
        columns = (item.index_select(0, index) for item in (self.peak, self.before, self.number))
        return Choices(self.held.index_select(0, index), self.ticks[index], *columns)

    def _by(self, moves: Moves, numbers: Sequence[int], limit_bytes: int, least_after: int) -> Choices:
        """Continue by moves, in no order, where it fits and what comes after it still can."""
        most = limit_bytes - torch.maximum(moves.need, moves.held + least_after)
        index = (self.held[:, None] <= most).flatten().nonzero().flatten()
        count = len(moves.held)
        before = torch.div(index, count, rounding_mode="floor")
        number = index - before * count
        held_before = self.held.index_select(0, before)
        need = held_before + moves.need.index_select(0, number)
        return Choices(
            held_before + moves.held.index_select(0, number),
            self.ticks[before] + moves.ticks[number],
            torch.maximum(self.peak.index_select(0, before), need),
            before,
            _whole(numbers).index_select(0, number),
        )

    def thinned(self, most: int) -> Choices:
        """Keep the best of each of `most` equal ranges of held bytes, and the fastest.

        Best is what lies furthest below the line of time over held bytes, drawn from the fastest of the range before to the
        fastest of this one. If the fastest were kept, what is held would grow by most of a range at every block.
        """
        above = self.held - self.held[0]
        width = int(above[-1]) // most + 1
        _, group, counts = torch.unique_consecutive(
            torch.div(above, width, rounding_mode="floor"), return_inverse=True, return_counts=True
        )
        ends = counts.cumsum(0) - 1
        starts = torch.cat([ends.new_zeros(1), ends[:-1]])
        room = self.held[ends] - self.held[starts]
        times = self.ticks[torch.cat([starts[:1], ends])].exactly()
        gains = [one - other for one, other in pairwise(times)]
        gain = torch.tensor([float(item) for item in gains], dtype=torch.float64, device="cpu")
        score = self.ticks.about() * room[group].double() + above.double() * gain[group]
        least = torch.full_like(gain, torch.inf).scatter_reduce(0, group, score, "amin")
        left = (score <= least[group] * _ROUNDED).nonzero().flatten()
        chosen = (
            left if len(left) == len(ends) else _whole(self._best(left, group[left].tolist(), room.tolist(), gains))
        )
        last = len(self) - 1
        return self[chosen if int(chosen[-1]) == last else torch.cat([chosen, _whole([last])])]

    def _best(self, left: Tensor, groups: list[int], room: list[int], gains: list[int]) -> list[int]:
        """Return the best of each group, of those that are left: exactly, and the first one of several."""
        best: dict[int, tuple[int, int]] = {}
        rows = zip(groups, left.tolist(), self.held[left].tolist(), self.ticks[left].exactly())
        for group, index, held, ticks in rows:
            score = ticks * room[group] + held * gains[group]
            if group not in best or score < best[group][0]:
                best[group] = score, index
        return [index for _, index in best.values()]


class Continuation(NamedTuple):
    """Moves that begin at one block.

    Attributes:
        start: the number of the block.
        moves: the moves.
        numbers: theirs.
    """

    start: int
    moves: Moves
    numbers: Sequence[int]


def continued(rows: Sequence[Choices], moves: Sequence[Continuation], budget_bytes: float, least_after: int) -> Choices:
    """Return the choices that end with a block, where they fit and what comes after them still can.

    Args:
        rows: the choices up to each block before.
        moves: those that end with this block.
        budget_bytes: the peak that is allowed.
        least_after: the least that what comes after needs, above what is held then.
    """
    limit = _ANY if budget_bytes >= _ANY else int(budget_bytes)
    found = Choices.joined([rows[start]._by(ways, numbers, limit, least_after) for start, ways, numbers in moves])
    return found[_undominated(found.held, found.ticks, found.peak)]


def _undominated(held: Tensor, ticks: Times, peak: Tensor) -> Tensor:
    """Return the indices of those that take less than all before them; of those that hold as much the last is best.

    One that does not take less than the one before it is dropped, until there is none.
    """
    found = torch.arange(len(held), device="cpu")
    high, low = ticks.high, ticks.low
    while True:
        is_less = (low[1:] < low[:-1]) | ((low[1:] == low[:-1]) & (peak[1:] < peak[:-1]))
        is_left = (high[1:] < high[:-1]) | ((high[1:] == high[:-1]) & is_less)
        if bool(is_left.all()):
            break
        index = torch.cat([_whole([0]), is_left.nonzero().flatten() + 1])
        found, high, low, peak = (item.index_select(0, index) for item in (found, high, low, peak))
    held = held[found]
    is_last = (held[1:] != held[:-1]).nonzero().flatten()
    return found[torch.cat([is_last, _whole([len(found) - 1])])] if len(found) else found


def _joined(columns: Sequence[Tensor]) -> Tensor:
    return columns[0] if len(columns) == 1 else torch.cat(list(columns))


def _whole(numbers: Sequence[int]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64, device="cpu")

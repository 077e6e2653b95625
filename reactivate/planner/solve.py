"""The fastest choice of an option for each block that fits a budget. Numbers only.

Blocks run one after the other, forward, and backward in reverse. This is a multiple-choice knapsack problem (Sinha &
Zoltners, "The multiple-choice knapsack problem", Operations Research 27, 1979) with a capacity at every block: what the
blocks before it hold and what it needs itself must fit, too. One dynamic program solves it from the last block to the
first, for all budgets at once. For the rest of a chain, it keeps the *endings* that no other one beats: the peak that an
ending needs above what is held when it begins, and its time. A budget is answered by the fastest ending of the whole
chain that needs no more.

A block may move tensors to a storage. Copies run beside the blocks, one after the other in each direction:

- A block that moves tensors out waits until as many copies as may be in flight are left before its own. All that ran
  since, forward, has hidden that much of them.
- Its tensors come back while the blocks between it and the next one that moved tensors run backward, and that one, too.
  Its own backward waits for the rest.

An ending therefore also has what it stores, and its slack in both directions: the copies before it that it hides. With
`q` seconds of copies left when it begins, it takes `max(0, q - slack)` longer. That is exact, so one number a direction
is enough.

Times are integers (2**-60 of a second), so that sums do not depend on their order, and no byte is rounded. Where more
than `MOST` endings are left, the best of each of `MOST` equal ranges of bytes go on, so on long chains with many kinds of
blocks the answer may be slower than the fastest (`tests/planner/test_planner_solve.py` says by how much). It never exceeds
the budget, and the smallest peak is exact.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count, groupby, pairwise, repeat
from operator import attrgetter, itemgetter
from typing import TypeVar

MOST, MOST_MOVING = 500, 250  # ranges of bytes: of a chain, of one whose blocks may move tensors
_MOST_SMALLEST = 400  # endings of which each stores less than all that need less
_TICK_BITS = 60

Item = TypeVar("Item")


class Infeasible(Exception):
    """No choice of a chain fits the budget."""


@dataclass(frozen=True)
class Transfer:
    """The copies of a block's tensors to a storage and back: seconds, and the bytes that the storage keeps meanwhile."""

    out_seconds: float
    back_seconds: float
    stored_bytes: int


@dataclass(frozen=True)
class Option:
    """One way to treat a block.

    Attributes:
        name: of the candidate.
        seconds: how much longer a step takes by it, at least 0.
        held_bytes: alive after its forward until its backward begins, less what was alive before. May be negative.
        need_bytes: the most that is alive while its own forward or backward runs, above what the blocks before it hold.
        forward_seconds, backward_seconds: its time in each pass, which hides copies of other blocks.
        transfer: what is moved to a storage.
        span: the path of the container that is treated as one with the block in it; "" for a block by itself.
    """

    name: str
    seconds: float
    held_bytes: int
    need_bytes: int
    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    transfer: Transfer | None = None
    span: str = ""


@dataclass(frozen=True)
class Span:
    """One way to treat several blocks in a row as one: the number of the first, and an option for each, chosen together."""

    start: int
    options: tuple[Option, ...]

    def at(self, start: int, path: str) -> Span:
        """Return the same for equal blocks elsewhere, in the container at `path`."""
        return Span(start, tuple(replace(option, span=path) for option in self.options))


@dataclass(frozen=True)
class Solution:
    """An option for each block.

    Attributes:
        options: in the order of the blocks.
        seconds: how much longer a step takes, waits for copies included.
        peak_bytes: the most that is alive at any moment.
    """

    options: tuple[Option, ...]
    seconds: float
    peak_bytes: int

    @property
    def own_seconds(self) -> float:
        """Return how much longer a step takes, without waits for copies."""
        return math.fsum(option.seconds for option in self.options)


@dataclass(frozen=True)
class Chain:
    """Blocks that run one after the other, and backward in reverse. Times and stored bytes are numbers from 0 on.

    Args:
        menus: for each block the options to choose from; with a storage that has a limit, one that moves nothing among them.
        outside: for k from 0 to the number of blocks, the most bytes alive while no block runs and exactly the first k hold,
            above what these hold: the embedding has k = 0, the head and the loss have the last.
        limit_bytes: the most that the storage may keep; None for any number.
        in_flight: how many blocks' tensors may be on their way out at a time; 0: each copy is waited for.
        spans: what may be done with several blocks as one, in place of an option of each.

    Examples:
        >>> from reactivate.planner.solve import Chain, Option
        >>> keep, recompute = Option("keep", 0.0, 4, 5), Option("recompute", 1.0, 1, 6)
        >>> chain = Chain(menus=((keep, recompute),) * 3, outside=(0, 0, 0, 2))
        >>> chain.solution_of([keep, recompute, recompute]).peak_bytes
        11
    """

    menus: tuple[tuple[Option, ...], ...]
    outside: tuple[int, ...]
    limit_bytes: int | None = None
    in_flight: int = 1
    spans: tuple[Span, ...] = ()

    def solution_of(self, options: Iterable[Option]) -> Solution:
        """Return the solution that these options make, one for each block."""
        options = tuple(options)
        held, peak, waited, out, back = 0, self.outside[0], 0, 0, 0
        for option, outside in zip(options, self.outside[1:], strict=True):
            peak = max(peak, held + option.need_bytes)
            held += option.held_bytes
            peak = max(peak, held + outside)
            forward, backward = _ticks(option.forward_seconds), _ticks(option.backward_seconds)
            if option.transfer is None:
                out, back = max(0, out - forward), max(0, back - backward)
                continue
            sent, fetched = _ticks(option.transfer.out_seconds), _ticks(option.transfer.back_seconds)
            if not self.in_flight:
                waited += sent + fetched
                continue
            allowed = (self.in_flight - 1) * sent
            waited += max(0, out - allowed) + max(0, back - backward)
            out, back = max(0, min(out, allowed) + sent - forward), fetched
        seconds = math.fsum([*(option.seconds for option in options), math.ldexp(waited, -_TICK_BITS)])
        return Solution(options, seconds, peak)


def _ticks(seconds: float) -> int:
    return round(math.ldexp(seconds, _TICK_BITS))


# An ending: (need, time, stored, out slack, back slack, number of its first move, number of the ending after that).
_Ending = tuple[int, int, int, int, int, int, int]
_TIME, _TIME_AND_NEED, _ZEROS = itemgetter(1), itemgetter(1, 0), repeat(0)


@dataclass(frozen=True)
class _Move:
    """An option of a block, or a span: bytes held and needed, with what is outside right before and after; and ticks."""

    held: int
    need: int
    time: int
    stored: int
    forward: int
    backward: int
    sent: int | None
    fetched: int
    options: tuple[Option, ...]

    @classmethod
    def of(cls, chain: Chain, start: int, options: tuple[Option, ...]) -> _Move:
        held, need = 0, chain.outside[start]
        for option, outside in zip(options, chain.outside[start + 1 :]):
            need = max(need, held + option.need_bytes, held + option.held_bytes + outside)
            held += option.held_bytes
        time, forward, backward = (
            sum(map(_ticks, column))
            for column in zip(*((o.seconds, o.forward_seconds, o.backward_seconds) for o in options))
        )
        copies = options[0].transfer
        if copies is None:
            return cls(held, need, time, 0, forward, backward, None, 0, options)
        sent, fetched = _ticks(copies.out_seconds), _ticks(copies.back_seconds)
        return cls(held, need, time, copies.stored_bytes, forward, backward, sent, fetched, options)

    def beats(self, other: _Move) -> bool:
        """Return whether this is as good as `other` in every way; what `other` hides of others' copies counts for it."""
        if self.held > other.held or self.stored > other.stored or self.need > other.need:
            return False
        lost = max(0, other.forward - self.forward) + max(0, other.backward - self.backward)
        if self.sent is not None:
            if self.sent != other.sent:
                return False
            lost += max(0, self.fetched - other.fetched)
        return self.time + lost <= other.time


class Problem:
    """A chain, solved for every budget up to a largest one.

    Args:
        chain: the chain.
        most_bytes: the largest budget.

    Attributes:
        least_bytes: the smallest peak.

    Examples:
        >>> from reactivate.planner.solve import Chain, Option, Problem
        >>> keep, recompute = Option("keep", 0.0, 4, 5), Option("recompute", 1.0, 1, 6)
        >>> problem = Problem(Chain(menus=((keep, recompute),) * 3, outside=(0, 0, 0, 2)))
        >>> solution = problem.solve(11)
        >>> [option.name for option in solution.options], solution.seconds, solution.peak_bytes
        (['recompute', 'keep', 'keep'], 1.0, 11)
        >>> [(solution.peak_bytes, solution.seconds) for solution in problem.frontier()]
        [(8, 2.0), (11, 1.0), (14, 0.0)]
        >>> problem.least().peak_bytes
        8
    """

    def __init__(self, chain: Chain, most_bytes: float = math.inf) -> None:
        self._chain = chain
        transfers = [option.transfer for menu in chain.menus for option in menu if option.transfer is not None]
        self._is_moving = bool(transfers)
        self._most_out = max(1, chain.in_flight) * max((_ticks(item.out_seconds) for item in transfers), default=0)
        self._most_back = max((_ticks(item.back_seconds) for item in transfers), default=0)
        self._limit = _limit_of(chain)
        self._moves: list[list[_Move]] = [self._moves_at(start) for start in range(len(chain.menus))]
        held_before = _least_held(self._moves)
        last: _Ending = (chain.outside[-1], 0, 0, self._most_out, self._most_back, -1, -1)
        self._endings: list[list[_Ending]] = [[last]]  # from the end on: those after the last block come first
        for moves, held in zip(reversed(self._moves), reversed(held_before)):
            endings: list[_Ending] = []
            for number, move in enumerate(moves):
                endings += self._before(move, number)
            if most_bytes < math.inf:
                endings = [ending for ending in endings if held + ending[0] <= most_bytes]
            endings.sort()
            if self._is_moving:  # with copies to compare, the work grows with the square of what is compared
                self._endings.append(_unbeaten(self._thinned(endings)))
            else:
                self._endings.append(self._thinned(list(ever_faster(endings, _TIME))))
        self._whole = self._endings[-1]
        if not self._whole:
            raise Infeasible
        self.least_bytes: int = self._whole[0][0]

    def _moves_at(self, start: int) -> list[_Move]:
        chain = self._chain
        found: list[_Move] = []
        singles = [_Move.of(chain, start, (option,)) for option in chain.menus[start]]
        for move in sorted(
            singles, key=lambda item: (item.held, item.stored, item.need, item.time, item.sent is not None)
        ):
            if not any(other.beats(move) for other in found):
                found.append(move)
        spans = [_Move.of(chain, start, span.options) for span in chain.spans if span.start == start]
        if math.isinf(self._limit):
            found = [replace(move, stored=0) for move in found]
        return found + spans

    def _before(self, move: _Move, number: int) -> list[_Ending]:
        """Return the endings that begin with a move."""
        held, least, own, more = move.held, move.need, move.time, move.stored
        endings = self._endings[-len(move.options)]
        if not self._is_moving:  # of those that need no more than the move itself, the fastest is the last
            first = max(0, bisect_right(endings, (least - held, math.inf)) - 1)
            needs = [held + ending[0] for ending in endings[first:]]
            times = [own + ending[1] for ending in endings[first:]]
            needs[:1] = [max(least, need) for need in needs[:1]]  # only there is the move itself the most
            return list(zip(needs, times, _ZEROS, _ZEROS, _ZEROS, repeat(number), count(first)))
        forward, backward, most_out, most_back = move.forward, move.backward, self._most_out, self._most_back
        after = enumerate(endings)
        if move.sent is None:
            return [
                (
                    max(least, held + need),
                    own + time,
                    stored,
                    min(most_out, out + forward),
                    min(most_back, back + backward),
                    number,
                    index,
                )
                for index, (need, time, stored, out, back, _, _) in after
            ]
        found: list[_Ending] = []
        sent, fetched, in_flight = move.sent, move.fetched, self._chain.in_flight
        for index, (need, time, stored, out, back, _, _) in after:
            if stored + more > self._limit:
                continue
            if in_flight:
                waited = max(0, sent - forward - out) + max(0, fetched - back)
                slack = min((in_flight - 1) * sent, max(0, out + forward - sent)), min(most_back, backward)
            else:
                waited, slack = sent + fetched, (out, back)
            found.append((max(least, held + need), own + time + waited, stored + more, *slack, number, index))
        return found

    def _thinned(self, endings: list[_Ending]) -> list[_Ending]:
        """Keep the best of each of equal ranges of bytes, and all that may be the only ones to fit, if there are too many.

        Best is what lies furthest below the line of time over bytes, from the fastest of the range before to the fastest of
        this one. If the fastest were kept, what is needed would grow by most of a range at every block.
        """
        most = MOST_MOVING if self._is_moving else MOST
        if len(endings) <= (4 * most if self._is_moving else most):
            return endings
        least, last = endings[0][0], min(endings, key=_TIME_AND_NEED)
        width = (endings[-1][0] - least) // most + 1
        kept, before = {last, *_smallest(endings)}, endings[0]
        for _, group in groupby(endings, key=lambda ending: (ending[0] - least) // width):
            members = list(group)
            fastest = min(members, key=_TIME_AND_NEED) if self._is_moving else members[-1]
            room, gain = fastest[0] - before[0], before[1] - fastest[1]
            kept.add(min(members, key=lambda ending: ending[1] * room + ending[0] * gain))
            if self._is_moving:
                kept.add(min(members, key=lambda ending: (ending[1] - ending[3] - ending[4], ending[0])))
                kept.add(min(members, key=lambda ending: (ending[2], ending[1])))
            before = fastest
        return sorted(kept)

    # -- answers ------------------------------------------------------------------------------------------------------

    def solve(self, budget_bytes: float) -> Solution:
        """Return the fastest solution whose peak is within the budget; of several, the one with the smallest peak.

        Raises:
            Infeasible: there is none.
        """
        fitting = [ending for ending in self._whole if ending[0] <= budget_bytes]
        if not fitting:
            raise Infeasible
        ending = min(fitting, key=_TIME_AND_NEED)
        options: list[Option] = []
        while len(options) < len(self._moves):
            move = self._moves[len(options)][ending[5]]
            options += move.options
            ending = self._endings[len(self._moves) - len(options)][ending[6]]
        return self._chain.solution_of(options)

    def least(self) -> Solution:
        """Return the solution with the smallest peak, to the byte; of several, the fastest that `solve` finds."""
        return self.solve(self.least_bytes)

    def frontier(self, limit: int = 32) -> list[Solution]:
        """List the Pareto-optimal solutions, smallest peak first: in more memory each takes less time than the one before.

        Of more than `limit` (2 or more), these are the solutions for budgets that are evenly spaced from the smallest peak to
        that of the fastest solution, and both ends are among them.
        """
        low, fastest = self.least_bytes, self.solve(math.inf)
        found = {fastest.peak_bytes: fastest}
        for index in range(limit - 1):
            solution = self.solve(low + (fastest.peak_bytes - low) * index // (limit - 1))
            found[solution.peak_bytes] = solution
        gaps = list(pairwise(sorted(found)))
        while gaps and len(found) < limit:
            gaps.sort(key=lambda gap: gap[1] - gap[0])
            low, high = gaps.pop()
            solution = self.solve(high - 1)
            if solution.peak_bytes > low:
                found[solution.peak_bytes] = solution
                gaps.append((low, solution.peak_bytes))
        return list(ever_faster([found[peak] for peak in sorted(found)], attrgetter("seconds")))


def _least_held(moves: Sequence[Sequence[_Move]]) -> list[int]:
    """Return for each block the least that the blocks before it can hold."""
    found: list[float] = [0, *[math.inf] * len(moves)]
    for start, row in enumerate(moves):
        for move in row:
            end = start + len(move.options)
            found[end] = min(found[end], found[start] + move.held)
    return [int(held) for held in found[:-1]]


def _unbeaten(endings: Iterable[_Ending]) -> list[_Ending]:
    """Return the endings that no other one beats. Those that need least come first, before and after."""
    found: list[_Ending] = []
    least_time: float = math.inf
    for ending in endings:
        _, time, stored, out, back, _, _ = ending
        if time < least_time:
            least_time = time
            found.append(ending)
            continue
        for _, other, other_stored, other_out, other_back, _, _ in reversed(found):
            if other_stored <= stored and other + max(0, out - other_out) + max(0, back - other_back) <= time:
                break
        else:
            found.append(ending)
    return found


def _limit_of(chain: Chain) -> float:
    """Return the bytes that the storage may keep; infinite if no choice comes to its limit."""
    stored = (max(option.transfer.stored_bytes if option.transfer else 0 for option in menu) for menu in chain.menus)
    limit = chain.limit_bytes
    return math.inf if limit is None or sum(stored) <= limit else limit


def _smallest(endings: Sequence[_Ending]) -> list[_Ending]:
    """Return the endings that store less than all that need less, some of them if there are too many."""
    found: list[_Ending] = []
    for ending in endings:
        if not found or ending[2] < found[-1][2]:
            found.append(ending)
    if len(found) <= _MOST_SMALLEST:
        return found
    return [found[index * (len(found) - 1) // (_MOST_SMALLEST - 1)] for index in range(_MOST_SMALLEST)]


def ever_faster(items: Iterable[Item], time: Callable[[Item], float]) -> Iterator[Item]:
    """Drop what is no faster than something before it."""
    least = math.inf
    for item in items:
        if time(item) < least:
            least = time(item)
            yield item

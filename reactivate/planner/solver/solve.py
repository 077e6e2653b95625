"""The fastest choice of an entry for each block that fits a budget, exactly.

This is a multiple-choice knapsack problem (Sinha & Zoltners 1979) with a capacity at every block: what the blocks before
hold and what this one needs must fit, too. As in Pisinger, "A minimal algorithm for the multiple-choice knapsack problem"
(EJOR 83, 1995), a few blocks decide, and dynamic programming need only look at these:

1. Entries that hold, need and take no less than another of the same blocks go.
2. For each block there is a bound on what follows (see `bound`). A search along the chain that keeps only
   the few partial choices with the best bounds finds some solution, seldom the best.
3. A time is guessed between the bound of the whole and that solution. Entries by which no solution is that fast go (a
   Lagrangian bound: the multiplier is the slope of the bound at the budget); where only one is left, blocks become one.
4. Dynamic programming over what is left: partial choices (bytes held, time, peak), of which those go that another one
   dominates, and those whose bound is above the guess. If none is left at the end, the guess was too low. If more are left
   at some block than a width, only the best go on, the result may not be the best, and there is another turn with a better
   guess, a wider one.

A search that had to drop none for the width is the proof. There is no other end: the result is exact. Time is counted in
ticks, 2**-60 of a power of two above what the slowest choice takes: that is finer than a sum of floats.

What it does not do well: entries whose time is in proportion to the bytes that they save, nearly to the last digit: every
choice is then as fast as the bound says, and none can go (the subset-sum problem; no way is known that is fast and exact).
And a thousand blocks that are all equal: each is one that decides, so that it takes longer than if they all differ.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import itemgetter

from reactivate.errors import UsageError
from reactivate.planner.solver.bound import Bound, Move, bounds_of
from reactivate.planner.solver.chain import Chain, Pick, Solution
from reactivate.planner.solver.graph import Graph, contracted, graph_of

__all__ = ["Infeasible", "frontier", "least", "solve"]

_NEVER = 1 << 80  # more ticks than any choice takes
_FIRST_WIDTH, _WIDTH = 4, 256  # partial choices that go on from a block
_FACTOR = 4  # by which a guess, or a width, that was too small is increased
_WAY_BITS = 24

_Label = tuple[
    int, int, int, int
]  # a partial choice: held bytes, ticks, peak in bytes, and which label and move led here


class Infeasible(Exception):
    """No choice fits the budget.

    Attributes:
        least_bytes: the smallest budget that one fits.
    """

    def __init__(self, least_bytes: int) -> None:
        super().__init__(f"No choice fits the budget: the smallest that one fits is {least_bytes} bytes.")
        self.least_bytes = least_bytes


def solve(chain: Chain, budget_bytes: int) -> Solution:
    """The fastest solution whose peak is within the budget; of several, one with the smallest peak.

    Raises:
        Infeasible: there is none. It says from which budget on there is.

    Example:
        >>> from reactivate.planner.solver.chain import Chain, Candidate
        >>> from reactivate.planner.solver.solve import solve
        >>> keep, recompute = Candidate("keep", 0.0, 4, 5), Candidate("recompute", 1.0, 1, 6)
        >>> solution = solve(Chain(menus=((keep, recompute),) * 3, outside=(0, 0, 0, 2)), budget_bytes=11)
        >>> [pick.entry.name for pick in solution.picks], solution.seconds, solution.peak_bytes
        (['recompute', 'keep', 'keep'], 1.0, 11)
    """
    return _Problem.of(chain).solve(budget_bytes)


def least(chain: Chain) -> Solution:
    """The solution with the smallest peak, to the byte; of several, one that is the fastest.

    Example:
        >>> from reactivate.planner.solver.chain import Chain, Candidate
        >>> from reactivate.planner.solver.solve import least
        >>> keep, recompute = Candidate("keep", 0.0, 4, 5), Candidate("recompute", 1.0, 1, 6)
        >>> least(Chain(menus=((keep, recompute),) * 3, outside=(0, 0, 0, 2))).peak_bytes
        8
    """
    problem = _Problem.of(chain)
    return problem.solve(problem.least_bytes)


def frontier(chain: Chain, limit: int = 32) -> list[Solution]:
    """The solutions than which none is smaller and at least as fast, or faster and at most as large. Smallest peak first.

    Args:
        chain: what is solved.
        limit: how many at most, from 2 on. Of more, these are the fastest for budgets that are evenly spaced from the
            smallest peak to that of the fastest solution, and both ends are among them.

    Raises:
        UsageError: the limit is too low.

    Example:
        >>> from reactivate.planner.solver.chain import Chain, Candidate
        >>> from reactivate.planner.solver.solve import frontier
        >>> keep, recompute = Candidate("keep", 0.0, 4, 5), Candidate("recompute", 1.0, 1, 6)
        >>> chain = Chain(menus=((keep, recompute),) * 3, outside=(0, 0, 0, 2))
        >>> [(solution.peak_bytes, solution.seconds) for solution in frontier(chain)]
        [(8, 2.0), (11, 1.0), (14, 0.0)]
    """
    if limit < 2:
        raise UsageError(
            f"A frontier of at most {limit} solutions was asked for: it has two ends, so ask for 2 or more."
        )
    problem = _Problem.of(chain)
    low_bytes = problem.least_bytes
    fastest = problem.solve(max(low_bytes, problem.most_bytes))
    found = {fastest.peak_bytes: fastest}
    for index in range(limit - 1):
        solution = problem.solve(low_bytes + (fastest.peak_bytes - low_bytes) * index // (limit - 1))
        found[solution.peak_bytes] = solution
    peaks = sorted(found)
    gaps = list(pairwise(peaks))
    while gaps and len(found) < limit:
        gaps.sort(key=lambda gap: gap[1] - gap[0])
        low_bytes, high_bytes = gaps.pop()
        solution = problem.solve(high_bytes - 1)
        if solution.peak_bytes > low_bytes:
            found[solution.peak_bytes] = solution
            gaps.append((low_bytes, solution.peak_bytes))
    return [found[peak] for peak in sorted(found)]


@dataclass(frozen=True)
class _Problem:
    """A chain, made ready to be solved for any budget."""

    chain: Chain
    graph: Graph
    bounds: list[Bound]

    @classmethod
    def of(cls, chain: Chain) -> _Problem:
        graph = graph_of(chain)
        return cls(chain, graph, bounds_of(list(graph.values()), chain.outside[-1]))

    @property
    def least_bytes(self) -> int:
        """The smallest peak: the left end of a bound is exact."""
        return self.bounds[0].rooms[0]

    @property
    def most_bytes(self) -> int:
        """No peak is larger."""
        moves = [move for row in self.graph.values() for move in row]
        held_bytes = sum(max(0, *(move.held for move in row)) for row in self.graph.values())
        return held_bytes + max((move.need for move in moves), default=self.chain.outside[0])

    def solve(self, budget_bytes: int) -> Solution:
        if budget_bytes < self.least_bytes:
            raise Infeasible(self.least_bytes)
        search = _BranchAndBound(self.chain.outside[0], self.bounds, budget_bytes)
        search.run(self.graph, _NEVER, _FIRST_WIDTH)
        low_ticks = self.bounds[0].ticks_in(budget_bytes)
        allowed = (search.ticks - low_ticks) // 16 + 1
        width = _WIDTH
        while True:
            guess = min(low_ticks + allowed, search.ticks)
            is_last = guess == search.ticks
            is_better, is_proof = search.run(self._reduced(budget_bytes, guess), guess, width)
            if not is_proof:
                width *= _FACTOR
            elif is_better or is_last:
                return self.chain.solution_of(search.picks, states=search.states)
            else:
                allowed, width = allowed * _FACTOR, _WIDTH

    def _reduced(self, budget_bytes: int, ticks: int) -> Graph:
        """The graph without the moves that no solution within the budget and the time makes.

        Room and time are weighted so that along the bound the sum is least at the budget. A solution's is at most the limit;
        what comes before a move has at least that of the shortest way, what comes after at least the least along the bound.
        """
        room_weight, tick_weight = self.bounds[0].weights_at(budget_bytes)
        limit = tick_weight * ticks + room_weight * budget_bytes
        after = [bound.least_of(room_weight, tick_weight) for bound in self.bounds]
        before = {0: 0}
        graph: Graph = {}
        for start, moves in self.graph.items():
            if start in before:
                graph[start] = []
                for move in moves:
                    weight = before[start] + room_weight * move.held + tick_weight * move.ticks
                    if weight + after[move.stop] <= limit:
                        graph[start].append(move)
                        before[move.stop] = min(weight, before.get(move.stop, weight))
        return contracted(graph)


class _BranchAndBound:
    """Dynamic programming within a budget, and the best solution that it found so far.

    Attributes:
        ticks, peak_bytes: of that solution.
        picks: what is chosen in it.
        states: how many partial choices were looked at.
    """

    def __init__(self, start_bytes: int, bounds: Sequence[Bound], budget_bytes: int) -> None:
        self.start: _Label = (0, 0, start_bytes, 0)
        self.bounds = bounds
        self.budget_bytes = budget_bytes
        self.ticks = _NEVER
        self.peak_bytes = budget_bytes + 1
        self.picks: list[Pick] = []
        self.states = 0

    def run(self, graph: Graph, ticks: int, width: int) -> tuple[bool, bool]:
        """Look for a better solution that takes no more than these ticks.

        Returns:
            whether there is one, and whether that, or that there is none, is proved.
        """
        end = len(self.bounds) - 1
        arrived: dict[int, list[_Label]] = {start: [] for start in [*graph, end]}
        arrived[0].append(self.start)
        is_proof = True
        for start, moves in graph.items():
            ranked = self._promising(start, arrived[start], ticks)
            self.states += len(ranked)
            if len(ranked) > width:
                is_proof = False
                ranked = sorted(heapq.nsmallest(width, ranked), key=itemgetter(1))
            arrived[start] = [label for _, label in ranked]
            for number, move in enumerate(moves):
                arrived[move.stop] += self._moved(arrived[start], move, number << _WAY_BITS | start)
        best = min(self._promising(end, arrived[end], ticks), key=lambda item: item[1][1:3], default=None)
        if best is None:
            return False, is_proof
        _, (_, self.ticks, self.peak_bytes, way) = best
        self.picks = _picks_on(way, graph, arrived, end)
        return True, is_proof

    def _promising(self, start: int, labels: Iterable[_Label], limit: int) -> list[tuple[int, _Label]]:
        """Return the labels that may lead to a better solution within `limit` ticks, each with a bound on its ticks."""
        bound, budget_bytes = self.bounds[start], self.budget_bytes
        most_held = budget_bytes - bound.rooms[0]
        peak_limit = self.peak_bytes if limit == self.ticks else budget_bytes + 1
        least_ticks, least_peak = _NEVER, 0
        found = []
        for label in sorted(labels):
            held, ticks, peak, _ = label
            if held > most_held:
                break
            if ticks < least_ticks or (ticks == least_ticks and peak < least_peak):
                least_ticks, least_peak = ticks, peak
                total = ticks + bound.ticks_in(budget_bytes - held)
                if total < limit or (total == limit and max(peak, held + bound.room_for(limit - ticks)) < peak_limit):
                    found.append((total, label))
        return found

    def _moved(self, labels: Iterable[_Label], move: Move, way: int) -> list[_Label]:
        """Return the labels that a move leads to from those that have room for it."""
        _, more_held, need, more_ticks, _ = move
        most_held = self.budget_bytes - need
        return [
            (held + more_held, ticks + more_ticks, max(peak, held + need), index << 2 * _WAY_BITS | way)
            for index, (held, ticks, peak, _) in enumerate(labels)
            if held <= most_held
        ]


def _picks_on(way: int, graph: Graph, labels: dict[int, list[_Label]], end: int) -> list[Pick]:
    """Return the choices on a way to the end: back from label to label."""
    mask = (1 << _WAY_BITS) - 1
    parts = []
    while end:
        end, number, index = way & mask, way >> _WAY_BITS & mask, way >> 2 * _WAY_BITS
        parts.append(graph[end][number].picks)
        way = labels[end][index][3]
    return [pick for part in reversed(parts) for pick in part]

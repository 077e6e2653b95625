"""The fastest choice of an entry for each block that fits a budget: exactly on short chains, very nearly on long ones.

This is a multiple-choice knapsack problem (Sinha & Zoltners, "The multiple-choice knapsack problem", Operations Research 27,
1979) with a capacity at every block: what the blocks before hold and what this one needs must fit, too. Dynamic programming
along the chain solves it, over partial choices. Of these it drops

1. those that cannot be completed: what the remaining blocks need at least is known exactly;
2. those that hold no less than another and are no better;
3. where more than `_MOST` are left, all but the best of each of `_MOST` equal ranges of held bytes.

Each step takes all partial choices of a block at once, in tensors (`rows`). No byte is rounded: the budget is held to the
byte, `Infeasible` is raised only where nothing fits, and a smallest peak is the smallest. Only the third step may lose the
fastest choice; `tests/test_planner_solve.py` says by how much. The work grows in proportion to the number of blocks. Chains
whose blocks may move tensors to a storage are solved by `moving`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from reactivate.errors import UsageError
from reactivate.planner.solver.chain import Candidate, Chain, Infeasible, Solution, ticks_of
from reactivate.planner.solver.moving import MovingProblem
from reactivate.planner.solver.rows import Choices, Continuation, Moves, continued

__all__ = ["Infeasible", "frontier", "least", "solve"]

_MOST = 500  # ranges of held bytes; no more partial choices than one of each, and the fastest, go on from a block


def solve(chain: Chain, budget_bytes: int) -> Solution:
    """Find the fastest solution whose peak is within the budget; of several, one with the smallest peak.

    On chains with more than `_MOST` partial choices it is close to that.

    Raises:
        Infeasible: there is none. It says from which budget on there is.

    Examples:
        >>> from reactivate.planner.solver.chain import Chain, Candidate
        >>> from reactivate.planner.solver.solve import solve
        >>> keep, recompute = Candidate("keep", 0.0, 4, 5), Candidate("recompute", 1.0, 1, 6)
        >>> solution = solve(Chain(menus=((keep, recompute),) * 3, outside=(0, 0, 0, 2)), budget_bytes=11)
        >>> [entry.name for entry in solution.entries], solution.seconds, solution.peak_bytes
        (['recompute', 'keep', 'keep'], 1.0, 11)
    """
    return _problem_of(chain).solve(budget_bytes)


def least(chain: Chain) -> Solution:
    """Find the solution with the smallest peak, to the byte; of several, the one that `solve` finds.

    Examples:
        >>> from reactivate.planner.solver.chain import Chain, Candidate
        >>> from reactivate.planner.solver.solve import least
        >>> keep, recompute = Candidate("keep", 0.0, 4, 5), Candidate("recompute", 1.0, 1, 6)
        >>> least(Chain(menus=((keep, recompute),) * 3, outside=(0, 0, 0, 2))).peak_bytes
        8
    """
    problem = _problem_of(chain)
    return problem.solve(problem.smallest_bytes)


def frontier(chain: Chain, limit: int = 32) -> list[Solution]:
    """List the Pareto-optimal solutions, smallest peak first: in more memory each takes less time than the one before.

    Args:
        chain: what is solved.
        limit: how many at most, from 2 on. Of more, these are the solutions for budgets that are evenly spaced from
            the smallest peak to that of the fastest solution, and both ends are among them.

    Raises:
        UsageError: the limit is too low.

    Examples:
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
    problem = _problem_of(chain)
    low_bytes = problem.smallest_bytes
    fastest = problem.solve(math.inf)
    found = {fastest.peak_bytes: fastest}
    for index in range(limit - 1):
        solution = problem.solve(low_bytes + (fastest.peak_bytes - low_bytes) * index // (limit - 1))
        found[solution.peak_bytes] = solution
    gaps = list(pairwise(sorted(found)))
    while gaps and len(found) < limit:
        gaps.sort(key=lambda gap: gap[1] - gap[0])
        low_bytes, high_bytes = gaps.pop()
        solution = problem.solve(high_bytes - 1)
        if solution.peak_bytes > low_bytes:
            found[solution.peak_bytes] = solution
            gaps.append((low_bytes, solution.peak_bytes))
    return _faster_and_faster(found[peak] for peak in sorted(found))


def _problem_of(chain: Chain) -> _Problem | MovingProblem:
    moves_tensors = any(entry.transfer is not None for menu in chain.menus for entry in menu)
    return MovingProblem.of(chain) if moves_tensors else _Problem.of(chain)


def _faster_and_faster(solutions: Iterable[Solution]) -> list[Solution]:
    """Drop those that are no faster than a smaller one: thinned, more room may lead to a slower choice."""
    found: list[Solution] = []
    for solution in solutions:
        if not found or solution.seconds < found[-1].seconds:
            found.append(solution)
    return found


class _Move(NamedTuple):
    """An entry of a block, or of several as one.

    Attributes:
        held: bytes.
        ticks: the time it takes.
        need: bytes, with what is outside of the blocks right before and after it.
        start: the number of the block, or of the first.
        entries: the entry of each.
    """

    held: int
    ticks: int
    need: int
    start: int
    entries: tuple[Candidate, ...]


@dataclass(frozen=True)
class _Problem:
    """A chain, made ready to be solved for any budget.

    Attributes:
        chain: the chain.
        moves: for each block those that are worth a choice and end with it.
        tensors: the same, in tensors: those that begin at each block.
        least_bytes: for each block, and for the end, the smallest peak of what comes from there on, by itself.
    """

    chain: Chain
    moves: list[list[_Move]]
    tensors: list[list[Continuation]]
    least_bytes: list[int]

    @classmethod
    def of(cls, chain: Chain) -> _Problem:
        moves, tensors = [], []
        known: dict[object, tuple[list[_Move], list[Continuation]]] = {}  # of equal blocks
        for number, menu in enumerate(chain.menus):
            kind = menu, chain.outside[number : number + 2]
            if kind not in known:
                row = _worthwhile(_move_of(chain, number, (entry,)) for entry in menu)
                known[kind] = row, _in_tensors(row)
            row, ways = known[kind]
            moves.append([move._replace(start=number) for move in row])
            tensors.append([way._replace(start=number) for way in ways])
        for span in chain.spans:
            end = span.start + len(span.entries) - 1
            moves[end].append(_move_of(chain, span.start, span.entries))
            tensors[end] = _in_tensors(moves[end])
        return cls(chain, moves, tensors, _least_bytes(moves, chain.outside[-1]))

    @property
    def smallest_bytes(self) -> int:
        """Return the smallest peak."""
        return self.least_bytes[0]

    def solve(self, budget_bytes: float) -> Solution:
        if budget_bytes < self.smallest_bytes:
            raise Infeasible(self.smallest_bytes)
        rows = [Choices.first(self.chain.outside[0])]
        for moves, least_after in zip(self.tensors, self.least_bytes[1:]):
            rows.append(_thinned(continued(rows, moves, budget_bytes, least_after)))
        entries: list[Candidate] = []
        end, index = len(self.moves), -1  # the fastest
        while end:
            move, index = self.moves[end - 1][int(rows[end].number[index])], int(rows[end].before[index])
            entries += reversed(move.entries)
            end = move.start
        return self.chain.solution_of(reversed(entries))


def _move_of(chain: Chain, start: int, entries: tuple[Candidate, ...]) -> _Move:
    held, need = 0, chain.outside[start]
    for entry, outside_after in zip(entries, chain.outside[start + 1 :]):
        need = max(need, held + entry.need_bytes, held + entry.held_bytes + outside_after)
        held += entry.held_bytes
    return _Move(held, sum(ticks_of(entry.seconds) for entry in entries), need, start, entries)


def _in_tensors(moves: Sequence[_Move]) -> list[Continuation]:
    """Return moves by where they begin; those of one block first."""
    found: dict[int, list[int]] = {}
    for number, move in enumerate(moves):
        found.setdefault(move.start, []).append(number)
    return [
        Continuation(start, Moves.of(*list(zip(*(moves[number] for number in numbers)))[:3]), numbers)
        for start, numbers in found.items()
    ]


def _least_bytes(moves: Sequence[Sequence[_Move]], outside_last: int) -> list[int]:
    """Return for each block, and for the end, the smallest peak of what comes from there on, by itself."""
    found: dict[int, int] = {len(moves): outside_last}
    for end in range(len(moves), 0, -1):  # all that begin at `end` are known by then
        for move in moves[end - 1]:
            peak = max(move.need, move.held + found[end])
            found[move.start] = min(found.get(move.start, peak), peak)
    return [found[number] for number in range(len(moves) + 1)]


def _worthwhile(moves: Iterable[_Move]) -> list[_Move]:
    """Return the moves that hold, need or take less than every other."""
    found: list[_Move] = []
    for move in sorted(moves, key=lambda move: move[:3]):
        if not any(other.need <= move.need and other.ticks <= move.ticks for other in found):
            found.append(move)
    return found


def _thinned(row: Choices) -> Choices:
    return row.thinned(_MOST) if len(row) > _MOST else row

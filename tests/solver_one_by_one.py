"""The steps of the solver on one partial choice at a time: what its tensors are compared with."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

from reactivate.planner.solver import solve as planner_solve
from reactivate.planner.solver.chain import Candidate, Chain, Solution

Partial = tuple[int, int, int, int, int, int]  # held bytes, ticks, peak in bytes, which start, before, move


def solve_one_by_one(chain: Chain, budget_bytes: float) -> Solution:
    problem: Any = planner_solve._problem_of(chain)
    rows: list[list[Partial]] = [[(0, 0, chain.outside[0], 0, 0, 0)]]
    for moves, least_after in zip(problem.moves, problem.least_bytes[1:]):
        rows.append(thinned(undominated(continued(rows, moves, budget_bytes, least_after)), planner_solve._MOST))
    entries: list[Candidate] = []
    end, index = len(problem.moves), -1
    while end:
        *_, index, number = rows[end][index]
        move = problem.moves[end - 1][number]
        entries += reversed(move.entries)
        end = move.start
    return chain.solution_of(reversed(entries))


def continued(rows: Sequence[Sequence[Partial]], moves: Any, budget_bytes: float, least_after: int) -> list[Partial]:
    starts = list(dict.fromkeys(move.start for move in moves))
    return [
        (held + move.held, ticks + move.ticks, max(peak, held + move.need), starts.index(move.start), before, number)
        for number, move in enumerate(moves)
        for before, (held, ticks, peak, *_) in enumerate(rows[move.start])
        if held <= budget_bytes - max(move.need, move.held + least_after)
    ]


def undominated(row: Iterable[Partial]) -> list[Partial]:
    found: list[Partial] = []
    for partial in sorted(row):
        if not found or partial[1:3] < found[-1][1:3]:
            found.append(partial)
    return found


def thinned(row: list[Partial], most: int) -> list[Partial]:
    if len(row) <= most:
        return row
    low = row[0][0]
    width = (row[-1][0] - low) // most + 1
    found, start = [], row[0]
    for _, group in groupby(row, key=lambda partial: (partial[0] - low) // width):
        *_, end = members = list(group)
        room, gain = end[0] - start[0], start[1] - end[1]
        found.append(min(members, key=lambda partial: partial[1] * room + partial[0] * gain))
        start = end
    return found if found[-1] is row[-1] else [*found, row[-1]]

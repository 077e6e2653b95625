"""The points of a chart of memory over time: the solver's frontier, and fixed policies to compare it with."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch.nn import Module

from reactivate._modules.blocks import blocks_of
from reactivate.planner.cost.prediction import Point
from reactivate.planner.solver.chain import Candidate, Chain, Solution
from reactivate.planner.solver.solve import frontier
from reactivate.planner.treatments import FULL, KEEP

_MOST = 24  # of the frontier
_EVERY = {"none()": 0, "full()": 1, **{f"recompute_every({k})": k for k in (2, 3, 4)}}


@dataclass(frozen=True)
class Points:
    """The peak and the time of choices for one step.

    Args:
        chain: the problem that is solved.
        paths: the unit of each of its blocks.
        fixed_bytes: what is there all the time.
        plain_seconds: the time of the plain step.
    """

    chain: Chain
    paths: Sequence[str]
    fixed_bytes: int
    plain_seconds: float

    @functools.cached_property
    def frontier(self) -> tuple[Point, ...]:
        """The solver's solutions, from the smallest peak to the fastest step."""
        return tuple(self._point("planned", solution) for solution in frontier(self.chain, _MOST))

    def frontier_with(self, smallest: Iterable[Point]) -> tuple[Point, ...]:
        """Return the frontier with the smallest choices that keep tensors in storages."""
        found: list[Point] = []
        for point in sorted([*smallest, *self.frontier], key=lambda point: (point.peak_bytes, point.seconds)):
            if not found or point.seconds < found[-1].seconds:
                found.append(point)
        return tuple(found)

    def policies(self, model: Module) -> tuple[Point, ...]:
        """Return the points of fixed policies for this model."""
        numbers = {path: number for number, path in enumerate(blocks_of(model))}
        return tuple(self._point(label, self.chain.solution_of(self._every(k, numbers))) for label, k in _EVERY.items())

    def _every(self, k: int, numbers: dict[str, int]) -> Iterator[Candidate]:
        """Every k-th block recomputed, all else kept; none for 0."""
        for path, menu in zip(self.paths, self.chain.menus):
            wanted = FULL if k and path in numbers and numbers[path] % k == 0 else KEEP
            yield next((entry for entry in menu if entry.name == wanted.name), menu[0])

    def _point(self, label: str, solution: Solution) -> Point:
        return Point(label, self.fixed_bytes + solution.peak_bytes, self.plain_seconds + solution.seconds)

"""From a table of treatments to a plan that holds: solve, simulate, correct, again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from reactivate.planner.profile.probe import Copies, Figures, Reading, TreatmentTable
from reactivate.planner.profile.trace import Trace
from reactivate.planner.solver.chain import Candidate, Chain, Solution
from reactivate.planner.solver.solve import Infeasible, least, solve
from reactivate.planner.treatments import Treatment

MOST_ROUNDS = 6


@dataclass(frozen=True)
class Proven:
    """A choice that was simulated.

    Attributes:
        treatments: by the paths of units.
        solution: what the solver said of it.
        trace: the simulated step.
        reading: what it reads.
        rounds: how many choices had been simulated by then, this one included.
    """

    treatments: dict[str, Treatment]
    solution: Solution
    trace: Trace
    reading: Reading
    rounds: int

    @property
    def names(self) -> dict[str, str]:
        """Return the names of the treatments, by the paths of units."""
        return {path: treatment.name for path, treatment in self.treatments.items()}


class Search:
    """Looks for choices whose simulated step holds what the solver promised.

    Args:
        table: the figures of the treatments.
        menus: what may be done with each unit.
        simulate: from treatments to the simulated step, and what it reads.
        copies: what the copies of treatments that use a storage cost.
    """

    def __init__(
        self,
        table: TreatmentTable,
        menus: Mapping[str, Sequence[Treatment]],
        simulate: Callable[[Mapping[str, Treatment]], tuple[Trace, Reading]],
        copies: Copies | None = None,
    ) -> None:
        self._table = table
        self._menus = menus
        self._simulate = simulate
        self._copies = copies
        self._corrections: dict[int, int] = {}
        self._seen: dict[tuple[Treatment, ...], tuple[Trace, Reading]] = {}

    @property
    def _chain(self) -> Chain:
        """The problem, as it is known by now."""
        return self._table.chain(self._menus, self._corrections, self._copies)

    def fit(self, budget_bytes: int) -> Proven | None:
        """The fastest choice that holds; None if there is none.

        Args:
            budget_bytes: of what the step allocates itself.
        """
        found = None if self._copies is None else self._fit_with_reserve(budget_bytes)
        return found or self._fit_with_corrections(budget_bytes)

    def _fit_with_reserve(self, budget_bytes: int) -> Proven | None:
        """The fastest choice that holds if some bytes are left for tensors that a storage still has in memory.

        These are the last ones that it took, and how large they are depends on the choice: so halve between what is too
        little and all that can be left.
        """
        self._corrections = {}  # so that what comes out does not depend on what was looked for before
        chain = self._chain
        low, high = -1, budget_bytes - least(chain).peak_bytes + 1
        best: Proven | None = None
        reserve = 0
        for _ in range(MOST_ROUNDS + 2):
            if not low < reserve < high:
                break
            found = self._prove(solve(chain, budget_bytes - reserve))
            if found.trace.fits(budget_bytes):
                best, high = found, reserve
            else:
                low = reserve
            reserve = (low + high) // 2
        return best

    def _fit_with_corrections(self, budget_bytes: int) -> Proven | None:
        found = self._corrected(budget_bytes)
        if found is not None:
            return found
        smallest = self.smallest()
        return smallest if smallest.trace.fits(budget_bytes) else None

    def _corrected(self, budget_bytes: int) -> Proven | None:
        """Return the fastest choice that holds, among those that the problem, corrected after each trial, says to hold."""
        self._corrections = {}
        limit = budget_bytes
        for _ in range(MOST_ROUNDS):
            try:
                found = self._prove(solve(self._chain, limit))
            except Infeasible:
                break
            if found.trace.fits(budget_bytes):
                return found
            if not self._correct(found):
                limit -= max(1, found.trace.needed_bytes - budget_bytes)
        return None

    def smallest(self) -> Proven:
        """The choice with the least peak; of those, if there are any, in which the storage can do its part."""
        found: Proven | None = self._least_corrected()
        while found is not None:
            best = found
            found = self._corrected(best.trace.needed_bytes - 1)
        return best

    def _least_corrected(self) -> Proven:
        """Return that choice as the problem has it, corrected after each trial.

        A correction holds for all that may be done at its position, and may be too large for what was not tried.
        """
        best: Proven | None = None
        self._corrections = {}
        for _ in range(MOST_ROUNDS):
            found = self._prove(least(self._chain))
            if best is None or _rank(found) < _rank(best):
                best = found
            if not self._correct(found) or least(self._chain).peak_bytes >= best.trace.needed_bytes:
                break
        assert best is not None
        return best

    def prove(self, names: Mapping[str, str]) -> Proven:
        """Simulate a choice that another rank has made.

        Args:
            names: of the treatments, by the paths of units.
        """
        chain = self._chain
        entries = [
            next((one for one in menu if one.name == names.get(path)), menu[0])
            for path, menu in zip(self._table.plain.paths, chain.menus)
        ]
        for span in chain.spans:
            first = span.entries[0]
            if names.get(first.span) == first.name:
                entries[span.start : span.start + len(span.entries)] = span.entries
        return self._prove(chain.solution_of(entries))

    def _prove(self, solution: Solution) -> Proven:
        treatments = self._treatments_of(solution.entries)
        key = tuple(treatments.values())
        if key not in self._seen:
            self._seen[key] = self._simulate(treatments)
        trace, reading = self._seen[key]
        return Proven(treatments, solution, trace, reading, len(self._seen))

    def _treatments_of(self, entries: Sequence[Candidate]) -> dict[str, Treatment]:
        chosen: dict[str, Treatment] = {}
        for path, entry in zip(self._table.plain.treated, entries):
            unit = entry.span or path
            if unit is not None and unit not in chosen:
                chosen[unit] = next(item for item in self._menus[unit] if item.name == entry.name)
        return chosen

    def _correct(self, found: Proven) -> bool:
        """Take into the problem where the simulated step is above or below the promise."""
        reading = self._seen[tuple(found.treatments.values())][1]
        if reading.paths != self._table.plain.paths:
            return False
        entries = found.solution.entries
        promised = dict(_tops_of(entries, self._chain.outside))
        changed = False
        for position, top in _tops_of(reading.calls, reading.outside_bytes):
            # The entries of a span promise what lies around its calls, too: that may be less.
            is_loose = any(entry.span for entry in entries[max(0, position // 2 - 1) : position // 2 + 1])
            if top > promised[position] or (top < promised[position] and not is_loose):
                self._corrections[position] = self._corrections.get(position, 0) + top - promised[position]
                changed = True
        return changed


def _rank(found: Proven) -> tuple[bool, int]:
    return bool(found.trace.failures), found.trace.needed_bytes


def _tops_of(calls: Sequence[Figures | Candidate], outside_bytes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The most that is alive at each position, read or promised."""
    held = 0
    for index, call in enumerate(calls):
        yield 2 * index, held + outside_bytes[index]
        yield 2 * index + 1, held + call.need_bytes
        held += call.held_bytes
    yield 2 * len(calls), held + outside_bytes[-1]

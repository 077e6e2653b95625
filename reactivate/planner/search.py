"""The search for a choice that keeps its promise: solve, trace a step, correct the problem or the budget, repeat."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch.nn import Module

from reactivate._modules.blocks import blocks_of
from reactivate._region.accounts import in_words
from reactivate.errors import UsageError
from reactivate.planner.candidates import FULL, Candidate, moving
from reactivate.planner.contents import Point
from reactivate.planner.distributed import Ranks
from reactivate.planner.offload import ASKED, Offer
from reactivate.planner.prediction import Flow, time_copies
from reactivate.planner.progress import Tell
from reactivate.planner.solve import Chain, Infeasible, Option, Problem, Solution
from reactivate.planner.table import CallSummary, CandidateTable, TraceSummary, plan_rounds
from reactivate.planner.trace.records import Trace
from reactivate.storage.rehearsal import in_pages

MOST_ROUNDS = 6
_MOST_POINTS = 24  # of the frontier
_EVERY = {"none()": 0, "full()": 1, **{f"recompute_every({k})": k for k in (2, 3, 4)}}

Attempt = Callable[[Mapping[str, Candidate]], tuple[Trace, TraceSummary]]


@dataclass(frozen=True)
class ProvenStep:
    """A choice of candidates whose step was traced.

    Attributes:
        candidates: by the paths of units.
        solution: what the solver said of it.
        trace, summary: the step.
        rounds: how many choices had been traced by then, this one included.
        own_seconds: of the step, without waits for copies.
        search: what has found it.
    """

    candidates: dict[str, Candidate]
    solution: Solution
    trace: Trace
    summary: TraceSummary
    rounds: int
    own_seconds: float
    search: Search

    @property
    def names(self) -> dict[str, str]:
        """The names of the candidates, by the paths of units."""
        return {path: candidate.name for path, candidate in self.candidates.items()}

    @functools.cached_property
    def flow(self) -> Flow:
        """The copies of the step on its clock."""
        offer = self.search.offer
        if offer is None:
            return Flow()
        scale = self.own_seconds / self.trace.seconds if self.trace.seconds else 0.0
        return time_copies(self.trace, offer.link, scale, is_awaited=offer.in_flight == 0)

    @property
    def seconds(self) -> float:
        """The seconds of the step."""
        return self.own_seconds + self.flow.waited_seconds


class Search:
    """Looks for choices whose traced step holds what the solver promised.

    Args:
        table: what each candidate of each unit comes to.
        menus: the candidates of each unit.
        attempt: from candidates to the traced step and its summary.
        offer: the storage that some candidates use.
        heads: what is done with the modules whose loss is computed by rows, by path; `attempt` takes it into account.
        head_seconds: how much longer the step takes by that.
    """

    def __init__(
        self,
        table: CandidateTable,
        menus: Mapping[str, Sequence[Candidate]],
        attempt: Attempt,
        plain_seconds: float,
        *,
        offer: Offer | None = None,
        heads: Mapping[str, Candidate] | None = None,
        head_seconds: float = 0.0,
    ) -> None:
        self._table, self._menus, self._attempt, self.offer = table, menus, attempt, offer
        self._plain_seconds, self.heads, self.head_seconds = plain_seconds, heads or {}, head_seconds
        self._corrections: dict[int, int] = {}
        self._seen: dict[tuple[Candidate, ...], tuple[Trace, TraceSummary]] = {}

    @property
    def chain(self) -> Chain:
        """The problem, before any choice was proved."""
        return self._table.chain(self._menus, {})

    @property
    def _corrected_chain(self) -> Chain:
        """The problem, as it is known by now."""
        return self._table.chain(self._menus, self._corrections, self.offer)

    # -- a budget -----------------------------------------------------------------------------------------------------

    def fit(self, budget_bytes: int) -> ProvenStep | None:
        """Return the fastest choice that holds; None if there is none.

        Args:
            budget_bytes: of what the step allocates itself.
        """
        found = None if self.offer is None else self._fit_with_reserve(budget_bytes)
        found = found or self._corrected(budget_bytes)
        if found is not None:
            return found
        smallest = self.smallest()
        return smallest if smallest.trace.fits(budget_bytes) else None

    def _fit_with_reserve(self, budget_bytes: int) -> ProvenStep | None:
        """Return the fastest choice that holds if some bytes are left for tensors that a storage still has in memory.

        These are the last ones that it took, and how large they are depends on the choice: so halve between what is too
        little and all that can be left.
        """
        self._corrections = {}  # so that what comes out does not depend on what was looked for before
        try:
            problem = Problem(self._corrected_chain, budget_bytes)
        except Infeasible:
            return None
        low, high = -1, budget_bytes - problem.least_bytes + 1
        best: ProvenStep | None = None
        reserve = 0
        for _ in range(MOST_ROUNDS + 2):
            if not low < reserve < high:
                break
            found = self._prove(problem.solve(budget_bytes - reserve))
            if found.trace.fits(budget_bytes):
                best, high = found, reserve
            else:
                low = reserve
            reserve = (low + high) // 2
        return best

    def _corrected(self, budget_bytes: int) -> ProvenStep | None:
        """Return the fastest choice that holds, among those that the problem, corrected after each trace, says to hold."""
        self._corrections = {}
        limit = budget_bytes
        for _ in range(MOST_ROUNDS):
            try:
                found = self._prove(Problem(self._corrected_chain, limit).solve(limit))
            except Infeasible:
                break
            if found.trace.fits(budget_bytes):
                return found
            if not self._correct(found):
                limit -= max(1, found.trace.needed_bytes - budget_bytes)
        return None

    def promised_seconds(self, budget_bytes: int) -> float:
        """Return the seconds of the fastest choice as the problem has it, before any proof; 0 if it knows of none."""
        try:
            solution = Problem(self.chain, budget_bytes).solve(budget_bytes)
        except Infeasible:
            return 0.0
        return self._plain_seconds + self.head_seconds + solution.seconds

    def smallest(self) -> ProvenStep:
        """Return the choice with the least peak. A choice in which the storage fails comes last."""
        found: ProvenStep | None = self._least_corrected()
        while found is not None:
            best = found
            found = self._corrected(best.trace.needed_bytes - 1)
        return best

    def _least_corrected(self) -> ProvenStep:
        """Return that choice as the problem has it, corrected after each trace.

        A correction holds for all that may be done at its position, and may be too large for what was not tried.
        """
        best: ProvenStep | None = None
        self._corrections = {}
        problem = Problem(self._corrected_chain)
        for _ in range(MOST_ROUNDS):
            found = self._prove(problem.least())
            if best is None or _rank(found) < _rank(best):
                best = found
            if not self._correct(found):
                break
            problem = Problem(self._corrected_chain)
            if problem.least_bytes >= best.trace.needed_bytes:
                break
        assert best is not None
        return best

    # -- proofs -------------------------------------------------------------------------------------------------------

    def prove(self, names: Mapping[str, str]) -> ProvenStep:
        """Trace a choice that another rank has made: the names of candidates, by the paths of units."""
        chain = self._corrected_chain
        options = self._options(chain, names)
        for span in chain.spans:
            first = span.options[0]
            if names.get(first.span) == first.name:
                options[span.start : span.start + len(span.options)] = span.options
        return self._prove(chain.solution_of(options))

    def _options(self, chain: Chain, names: Mapping[str, str]) -> list[Option]:
        """Return an option for each call: that with the name of its unit's candidate, or else the first."""
        return [
            next((option for option in menu if option.name == names.get(path)), menu[0])
            for path, menu in zip(self._table.plain.paths, chain.menus)
        ]

    def _prove(self, solution: Solution) -> ProvenStep:
        candidates: dict[str, Candidate] = {}
        for path, option in zip(self._table.plain.treated, solution.options):
            unit = option.span or path
            if unit is not None and unit not in candidates:
                candidates[unit] = next(item for item in self._menus[unit] if item.name == option.name)
        key = tuple(candidates.values())
        if key not in self._seen:
            self._seen[key] = self._attempt(candidates)
        seconds = self._plain_seconds + self.head_seconds + solution.own_seconds
        return ProvenStep(candidates, solution, *self._seen[key], len(self._seen), seconds, self)

    def _correct(self, found: ProvenStep) -> bool:
        """Take into the problem where the traced step is above or below the promise."""
        if found.summary.paths != self._table.plain.paths:
            return False
        options = found.solution.options
        promised = dict(_tops_of(options, self._corrected_chain.outside))
        changed = False
        for position, top in _tops_of(found.summary.calls, found.summary.outside_bytes):
            # The options of a span promise what lies around its calls, too: that may be less.
            is_loose = any(option.span for option in options[max(0, position // 2 - 1) : position // 2 + 1])
            if top > promised[position] or (top < promised[position] and not is_loose):
                self._corrections[position] = self._corrections.get(position, 0) + top - promised[position]
                changed = True
        return changed

    # -- points of a chart of memory over time ------------------------------------------------------------------------

    def frontier(self, fixed_bytes: int, label: str = "planned") -> tuple[Point, ...]:
        """Return the solutions for other budgets, from the smallest peak to the fastest step, before any proof."""
        solutions = Problem(self.chain).frontier(_MOST_POINTS)
        return tuple(self._point(label, fixed_bytes, solution) for solution in solutions)

    def policies(self, model: Module, fixed_bytes: int) -> tuple[Point, ...]:
        """Return the points of fixed policies for this model: every k-th block recomputed, all else kept; none for 0."""
        chain = self.chain
        numbers = {path: number for number, path in enumerate(blocks_of(model))}
        points = []
        for label, k in _EVERY.items():
            names = {path: FULL.name for path, number in numbers.items() if k and number % k == 0}
            points.append(self._point(label, fixed_bytes, chain.solution_of(self._options(chain, names))))
        return tuple(points)

    def _point(self, label: str, fixed_bytes: int, solution: Solution) -> Point:
        seconds = self._plain_seconds + self.head_seconds + solution.seconds
        return Point(label, fixed_bytes + solution.peak_bytes, seconds)


def _rank(found: ProvenStep) -> tuple[bool, int]:
    return bool(found.trace.failures), found.trace.needed_bytes


def _tops_of(calls: Sequence[CallSummary | Option], outside_bytes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The most that is alive at each position, traced or promised."""
    held = 0
    for index, call in enumerate(calls):
        yield 2 * index, held + outside_bytes[index]
        yield 2 * index + 1, held + call.need_bytes
        held += call.held_bytes
    yield 2 * len(calls), held + outside_bytes[-1]


class SharedSearch:
    """Looks for one choice that holds on all ranks: that of the rank that has the least room.

    Args:
        room_bytes: what its step may allocate itself.
        plain_bytes: what its plain step does.
    """

    def __init__(self, ranks: Ranks, search: Search, room_bytes: int, plain_bytes: int) -> None:
        self._ranks, self._search, self._room_bytes = ranks, search, room_bytes
        rooms = ranks.gather((room_bytes, plain_bytes))
        self._leader = min(range(len(rooms)), key=lambda rank: rooms[rank][0] - rooms[rank][1])
        self._limit_bytes = min(room for room, _ in rooms)

    def fit(self) -> ProvenStep | None:
        """Return the fastest choice of the leading rank that holds on all, as it is on this one; None if none does."""
        limit = self._limit_bytes
        for _ in range(MOST_ROUNDS):
            found = self._proposed(functools.partial(self._search.fit, limit))
            if found is None:
                break
            worst = self._worst(found)
            if worst <= 0:
                return found
            limit -= worst
        smallest = self.smallest()
        return smallest if self._worst(smallest) <= 0 else None

    def smallest(self) -> ProvenStep:
        """Return the leading rank's choice with the least peak, as it is on this one."""
        found = self._proposed(self._search.smallest)
        assert found is not None
        return found

    def _worst(self, found: ProvenStep) -> int:
        """Return by how much a choice is too large where it fits least; not above 0 where it fits all."""
        return max(self._ranks.gather(found.trace.needed_bytes - self._room_bytes))

    def _proposed(self, propose: Callable[[], ProvenStep | None]) -> ProvenStep | None:
        own = propose() if self._ranks.number == self._leader else None
        names: dict[str, str] | None = self._ranks.gather(None if own is None else own.names)[self._leader]
        return own if own is not None or names is None else self._search.prove(names)


Menus = dict[str, tuple[Candidate, ...]]


def storage_menus(offer: Offer, menus: Menus, table: CandidateTable, attempt: Attempt, tell: Tell) -> Menus:
    """Return the candidates of units, with those that keep tensors in a storage, and enter what these come to into `table`.

    Args:
        offer: the storage; the sizes of tensors that it may take are entered into it.
        menus: the candidates of units without a storage, by their paths.
        attempt: traces a step in which the storage lets go and brings back at once.

    Raises:
        UsageError: there is nothing that it would take.
    """
    more = {path: moving(menu, offer.name) for path, menu in menus.items()}
    failed: set[tuple[str, Candidate]] = set()
    while rounds := plan_rounds(more, table):
        for number, candidates in enumerate(rounds, start=1):
            tell(f"policies with {offer.name}, simulated: {number} of {len(rounds)}")
            trace, summary = attempt(candidates)
            if trace.failures:
                failed |= set(candidates.items())
            table.enter(summary, candidates)
            offer.sizes.update(in_pages(move.nbytes) for move in trace.moves if move.what == "taken")
    if offer.residence is not None and any(more.values()):
        _check_sizes(offer, offer.residence.least_bytes)

    def is_worth_it(path: str, candidate: Candidate) -> bool:
        change = table.change(path, candidate)
        if change is None or (path, candidate) in failed:
            return False
        return offer.residence is None or bool(change.moved)

    return {path: (*menu, *(item for item in more[path] if is_worth_it(path, item))) for path, menu in menus.items()}


def _check_sizes(offer: Offer, least_bytes: int) -> None:
    """See to it that the storage would take anything."""
    if not offer.sizes:
        raise UsageError(
            f"{ASKED}: {offer.storage!r} would move nothing: of what this step can keep in it, no tensor is as large as its "
            f"least_bytes={least_bytes:,}. Leave the storage out, or lower that."
        )
    smallest, limit = min(offer.sizes), offer.limit_bytes
    if limit is not None and smallest > limit:
        raise UsageError(
            f"{ASKED}: {offer.storage!r} has room for {in_words(limit)} of a plan's tensors, and the smallest of them takes "
            f"{in_words(smallest)}. Raise its limit, or leave it out."
        )

"""The search for plans that keep tensors in one storage."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Protocol

from torch.nn import Module

from reactivate._region.accounts import in_words
from reactivate.errors import UsageError
from reactivate.planner.chosen import ChosenStep
from reactivate.planner.cost.flow import flow_of
from reactivate.planner.offers import ASKED, Offer
from reactivate.planner.profile.probe import Reading, TreatmentTable
from reactivate.planner.profile.rounds import rounds_of
from reactivate.planner.profile.trace import Trace
from reactivate.planner.progress import Tell
from reactivate.planner.solver.solution import Proven, Search
from reactivate.planner.treatments import Treatment, moving
from reactivate.storage.rehearsal import in_pages


class Profiled(Protocol):
    """A step whose treatments without a storage are known."""

    units: dict[str, Module]
    menus: dict[str, tuple[Treatment, ...]]
    table: TreatmentTable
    plain_seconds: float

    def attempt(
        self, treatments: Mapping[str, Treatment], offer: Offer | None = None, *, at_once: bool = False
    ) -> tuple[Trace, Reading]:
        """Simulate the step with these treatments."""


class StorageSearch:
    """Looks for plans that keep tensors in a storage.

    Args:
        offer: the storage.
        step: the step that is planned.
        tell: says what goes on.
    """

    def __init__(self, offer: Offer, step: Profiled, tell: Tell) -> None:
        self.offer = offer
        self._step = step
        self._tell = tell

    def prepare(self) -> StorageSearch:
        """Find out what treatments with the storage come to.

        Raises:
            UsageError: there is nothing that it would take.
        """
        step, offer = self._step, self.offer
        more = {path: moving(menu, offer.name) for path, menu in step.menus.items()}
        failed: set[tuple[str, Treatment]] = set()
        rounds = [treatments for treatments in rounds_of(step.units, more, step.table) if treatments]
        for number, treatments in enumerate(rounds, start=1):
            self._tell(f"policies with {offer.name}, simulated: {number} of {len(rounds)}")
            trace, reading = step.attempt(treatments, offer, at_once=True)
            if trace.failures:
                failed |= set(treatments.items())
            step.table.enter(reading, treatments)
            offer.sizes.update(in_pages(move.nbytes) for move in trace.moves if move.what == "taken")
        self._check(any(more.values()))
        menus = {
            path: (*menu, *(item for item in more[path] if self._is_worth_it(path, item, failed)))
            for path, menu in step.menus.items()
        }
        self._search = Search(step.table, menus, lambda chosen: step.attempt(chosen, offer), offer)
        return self

    def _is_worth_it(self, path: str, treatment: Treatment, failed: Set[tuple[str, Treatment]]) -> bool:
        """Return whether a treatment can be had, and moves anything."""
        figures = self._step.table.change(path, treatment)
        if figures is None or (path, treatment) in failed:
            return False
        return self.offer.residence is None or bool(figures.moved)

    def _check(self, has_regions: bool) -> None:
        """See to it that the storage would take anything."""
        offer = self.offer
        if offer.residence is None or not has_regions:
            return
        if not offer.sizes:
            raise UsageError(
                f"{ASKED}: {offer.storage!r} would move nothing: of what this step can keep in it, no tensor is as large "
                f"as its least_bytes={offer.residence.least_bytes:,}. Leave the storage out, or lower that."
            )
        smallest, limit = min(offer.sizes), offer.limit_bytes
        if limit is not None and smallest > limit:
            raise UsageError(
                f"{ASKED}: {offer.storage!r} has room for {in_words(limit)} of a plan's tensors, and the smallest of them "
                f"takes {in_words(smallest)}. Raise its limit, or leave it out."
            )

    def fit(self, budget_bytes: int) -> ChosenStep | None:
        """The fastest choice that holds; None if there is none.

        Args:
            budget_bytes: of what the step allocates itself.
        """
        self._tell(f"the plan with {self.offer.name}, solved and proved")
        found = self._search.fit(budget_bytes)
        return None if found is None else self._chosen(found)

    def _chosen(self, found: Proven) -> ChosenStep:
        own_seconds = self._step.plain_seconds + found.solution.own_seconds
        scale = own_seconds / found.trace.seconds if found.trace.seconds else 0.0
        flow = flow_of(found.trace, self.offer.link, scale, is_awaited=self.offer.in_flight == 0)
        return ChosenStep(found, own_seconds, flow)

    def smallest(self) -> ChosenStep | None:
        """The choice with the least peak; None if the storage can do its part in none that was tried."""
        found = self._search.smallest()
        return None if found.trace.failures else self._chosen(found)

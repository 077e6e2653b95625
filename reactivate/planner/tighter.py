"""Ever tighter plans for a step that runs out of memory, down to the least."""

from __future__ import annotations

import functools
import gc
import math
import re
import traceback
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import torch
from torch.nn import Module

from reactivate._model.applied import Applied
from reactivate._model.apply import apply
from reactivate._modules.paths import is_below
from reactivate._modules.spans import SpanPlace
from reactivate._region.accounts import is_shortage
from reactivate._text.words import counted
from reactivate.errors import PlanInfeasible
from reactivate.planner.adaptive import AdaptivePlan
from reactivate.planner.budget import parse
from reactivate.planner.candidates import FULL
from reactivate.planner.contents import Decision
from reactivate.planner.plan import Plan
from reactivate.planner.units import find_units, unit_digests

Value = TypeVar("Value")

_ASKED = re.compile(r"tried to allocate ([0-9.]+) ?(bytes|KiB|MiB|GiB)", re.IGNORECASE)
_TRIES = 5  # under ever tighter plans: the last of them is the least
_UNSAID = 0.05  # of the plan's peak: by how much it is tightened where the error does not say what was missing


class NoTighterPlan(Exception):
    """There is none, or none can be made; says why."""


def asked_bytes(shortage: Exception) -> int | None:
    """Return how much a step asked for when there was no more, if its error says that."""
    found = _ASKED.search(str(shortage))
    return None if found is None else parse(f"{found[1]} {found[2].replace('bytes', 'B')}").total_bytes


class Ladder:
    """The plans that one call of a guarded step has had.

    The first one is tighter by what was missing, each next one by half of what is left above the least plan, and the last one
    is the least.
    """

    def __init__(self) -> None:
        self._tries = self._had = 0

    def below(self, applied: Applied, shortage: Exception | None) -> Plan | AdaptivePlan | None:
        """Return a tighter plan; None for a rank that was not short, and that plans for itself.

        Args:
            applied: the plan, with its model.
            shortage: what the step has raised; None if another rank was short.

        Raises:
            NoTighterPlan: there is none.
        """
        plan: Plan | AdaptivePlan = applied.policy  # type: ignore[assignment]
        is_shared = _is_shared(plan)
        if shortage is None and not is_shared:
            return None
        asked = None if shortage is None else asked_bytes(shortage)
        if isinstance(plan, AdaptivePlan) and shortage is None:
            found: Plan | AdaptivePlan = plan.within(plan.budget_bytes)  # the other rank's is lowered
        elif isinstance(plan, AdaptivePlan):
            found = self._adaptive_below(plan, asked)
        else:
            found = self._plan_below(
                plan, None if is_shared else root_of(applied), asked, is_short=shortage is not None
            )
        self._had += 1
        return found

    def _plan_below(self, plan: Plan, model: Module | None, asked: int | None, *, is_short: bool) -> Plan:
        """Return a plan that does something else: one that does not holds for less, and so on.

        Args:
            model: its model; None if ranks share the plan: they go through this together, and know no block of one alone.
            asked: what was missing; None if that is not known.
            is_short: whether it was this rank.
        """
        assert plan.runner is not None
        peak_bytes, is_made = plan.predicted.peak_bytes, True
        least_bytes = _or_short(plan.runner.least_bytes)
        while self._tries < _TRIES and least_bytes is not None:
            self._tries += 1
            peak_bytes = self._budget_below(peak_bytes, least_bytes, asked)
            found = _or_short(functools.partial(_at, plan, peak_bytes if is_short else plan.budget_bytes))
            is_made = found is not None
            if found is not None:
                found = found if model is None else with_unseen(found, model)
                if not found.assignment.candidates.items() <= plan.assignment.candidates.items():
                    return found
        if is_made and least_bytes is not None:
            raise NoTighterPlan(self._nothing_left())
        raise NoTighterPlan("memory ran out while a tighter plan was made, too")

    def _budget_below(self, peak_bytes: int, least_bytes: int, asked: int | None) -> int:
        if self._tries == _TRIES:
            return least_bytes
        half_bytes = (peak_bytes - least_bytes) // 2 if self._tries > 1 else 0
        missing_bytes = math.ceil(_UNSAID * peak_bytes) if asked is None else asked
        return max(least_bytes, peak_bytes - max(missing_bytes, half_bytes))

    def _adaptive_below(self, plan: AdaptivePlan, asked: int | None) -> AdaptivePlan:
        """Return the same for a plan of all shapes, which takes the least for a shape if none holds the budget."""
        has_least = plan.recent_bytes > plan.budget_bytes  # the shape that failed
        if self._tries == _TRIES or has_least:
            raise NoTighterPlan(self._nothing_left())
        self._tries += 1
        return plan.within(self._budget_below(plan.recent_bytes, plan.profiled.fixed.total, asked))

    def _nothing_left(self) -> str:
        if not self._had:
            return "no plan takes less memory"
        return f"it has run {counted(self._had, 'more time')}, the last under the least plan that there is"

    def settle(self, applied: Applied) -> None:
        """The step has run: a budget that no plan holds for its shape becomes what its plan takes.

        Args:
            applied: the plan, with its model.
        """
        plan = applied.policy
        if self._had and isinstance(plan, AdaptivePlan) and plan.recent_bytes > plan.budget_bytes:
            replace_plan(applied, plan.within(plan.recent_bytes, is_tighter=False))


def _is_shared(plan: Plan | AdaptivePlan) -> bool:
    """Return whether ranks have one plan."""
    if isinstance(plan, AdaptivePlan):
        return plan.is_shared
    return plan.runner is not None and plan.runner.is_shared


def _or_short(make: Callable[[], Value]) -> Value | None:
    """Return what is made; None if memory runs out for that as well."""
    try:
        return make()
    except Exception as error:
        if not is_shortage(error):
            raise
        let_go(error)
        return None


def _at(plan: Plan, budget_bytes: int) -> Plan:
    """Return the plan for a budget; the same one if there is none, on a rank that shares it with one that has more."""
    try:
        return plan.at(budget_bytes)
    except PlanInfeasible:
        return plan


def let_go(error: BaseException | None) -> None:
    """Free what the frames that an error went through hold: the step's tensors. Its lines can still be read."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
    gc.collect()
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()


def root_of(applied: Applied) -> Module:
    """Return the model of a plan."""
    root = None if applied.root is None else applied.root()
    assert root is not None
    return root


def replace_plan(applied: Applied, plan: Plan | AdaptivePlan) -> None:
    """Apply another plan to the model of one, with the same options."""
    options = applied.options
    apply(
        root_of(applied),
        plan,
        guards=options.guards,
        early_stop=options.early_stop,
        check=options.check,  # type: ignore[arg-type]
        replace=True,
    )


def with_unseen(plan: Plan, model: Module) -> Plan:
    """Return a plan that also recomputes the units that did not run in the step that it was made for."""
    paths = [decision.path for decision in plan.decisions if not decision.candidate.by_rows]
    treated = [path if (place := SpanPlace.of(path)) is None else place.path for path in paths]
    units = {path: unit for path, unit in find_units(model).items() if not any(is_below(path, one) for one in treated)}
    unseen = [Decision(*facts, FULL, 0, 0.0) for facts in unit_digests(units)]
    return replace(plan, decisions=(*plan.decisions, *unseen)) if unseen else plan

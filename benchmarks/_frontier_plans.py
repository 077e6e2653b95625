"""The plans of a model: at the peak of every peer, at shares of the plain step's, and at the least budget."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from time import perf_counter

import torch
from _frontier_models import Subject
from _measure import Tick

import reactivate
from reactivate.errors import PlanInfeasible
from reactivate.planner.plan import Plan

SHARES = (90, 75, 50, 35, 25)
"""In percent of the plain step's peak."""
LEAST = "least"


@dataclass
class Plans:
    """The plans, by the budget in words.

    Attributes:
        first_seconds: on the wall, of the first plan, which profiles the model.
        further_seconds: of each other.
    """

    found: dict[str, Plan] = field(default_factory=dict)
    first_seconds: float = 0.0
    further_seconds: list[float] = field(default_factory=list)

    @property
    def fixed_bytes(self) -> int:
        """Return the bytes that are there all the time."""
        return self.found[LEAST].fixed.total

    @property
    def least_bytes(self) -> int:
        """The least budget for which there is a plan, over what is there all the time."""
        return budget_of(self.found[LEAST])

    @property
    def median_seconds(self) -> float:
        """Of a plan that profiles nothing."""
        return statistics.median(self.further_seconds)

    def name_of(self, label: str) -> str:
        """Of this plan: those that do the same have one name."""
        same = (other for other, plan in self.found.items() if plan.assignment == self.found[label].assignment)
        return next(same)


def make_plans(subject: Subject, peaks: Mapping[str, int], plain_bytes: int, tick: Tick) -> Plans:
    """Plan for each of these budgets, with one profile of the model.

    Args:
        subject: what is trained.
        peaks: {a budget in words: bytes over parameters, gradients and inputs}.
        plain_bytes: the plain step's peak, over the same.
        tick: called after each plan.
    """
    plans, began = Plans(), perf_counter()
    first = reactivate.plan(subject.model, subject.args, subject.kwargs, budget="100%", loss=subject.loss)
    plans.first_seconds = perf_counter() - began
    budgets = {**peaks, **{f"{share} %": plain_bytes * share // 100 for share in SHARES}}
    for label, size in budgets.items():
        began = perf_counter()
        with suppress(PlanInfeasible):
            plans.found[label] = first.at(first.fixed.total + size)
        plans.further_seconds.append(perf_counter() - began)
        tick()
    plans.found[LEAST] = first.at(_least_bytes(first))
    tick()
    return plans


def _least_bytes(plan: Plan) -> int:
    try:
        return plan.at(1).budget_bytes
    except PlanInfeasible as error:
        return error.least_bytes


def budget_of(plan: Plan) -> int:
    """Return the bytes that the step may allocate."""
    return plan.budget_bytes - plan.fixed.total


def does(plan: Plan) -> dict[str, int]:
    """{what is done: with how many parts of the model}."""
    return dict(Counter(decision.treatment.name for decision in plan.decisions))


def applied(plan: Plan, model: torch.nn.Module) -> torch.nn.Module:
    """The model, which runs as planned from here on."""
    reactivate.apply(model, plan)
    return model

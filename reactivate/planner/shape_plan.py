"""The plan of one class of shapes: chosen without a run, and a row in a table."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from reactivate._region.accounts import in_words
from reactivate._text.table import Column, Row, Table
from reactivate.planner.plan_table import seconds_in_words
from reactivate.planner.planner import Planner
from reactivate.planner.shapes import CallShapes
from reactivate.planner.treatments import KEEP, Assignment, Treatment


@dataclass(frozen=True)
class ShapePlan:
    """The plan for the batches of one class of shapes.

    Attributes:
        shapes: the largest ones that it was proved for.
        treatments: by the paths of units.
        plain_bytes: the peak of the plain step with them, all included.
        peak_bytes: the peak with this plan, all included.
        seconds: the time that the step takes longer than the plain one.
        planning_seconds: the time that it took to find out.
    """

    shapes: CallShapes
    treatments: Mapping[str, Treatment]
    plain_bytes: int
    peak_bytes: int
    seconds: float
    planning_seconds: float

    @functools.cached_property
    def policy(self) -> Assignment | None:
        """The policy; None where everything is kept."""
        return Assignment(self.treatments) if self.recomputed else None

    @property
    def recomputed(self) -> int:
        """Return the number of units that are not kept as they are."""
        return sum(treatment != KEEP for treatment in self.treatments.values())


def choose(planner: Planner, budget_bytes: int) -> tuple[dict[str, Treatment], int, float]:
    """Return the fastest treatments with which a step holds a budget, its peak, and the time that they take.

    If none holds it, those with the least peak.

    Args:
        planner: has looked at the plain step.
        budget_bytes: all included.
    """
    total, own_bytes = planner.fixed.total, planner.own_bytes(budget_bytes)
    if planner.plain.needed_bytes <= own_bytes:
        return dict.fromkeys(planner.units, KEEP), total + planner.plain.needed_bytes, 0.0
    planner.tabulate()
    found = planner.search.fit(own_bytes) or planner.search.smallest()
    return found.treatments, total + found.trace.needed_bytes, found.solution.seconds


_COLUMNS = (
    Column("shapes"),
    Column("recomputed"),
    *(Column(title, is_figure=True) for title in ("peak", "plain", "extra", "planned in")),
)


def table_of(plans: Iterable[ShapePlan]) -> Table:
    """Return a row for each plan."""
    rows = [
        Row(
            [
                str(plan.shapes),
                f"{plan.recomputed} of {len(plan.treatments)} blocks" if plan.recomputed else "nothing",
                in_words(plan.peak_bytes),
                in_words(plan.plain_bytes),
                seconds_in_words(plan.seconds),
                seconds_in_words(plan.planning_seconds),
            ]
        )
        for plan in plans
    ]
    return Table(_COLUMNS, rows)

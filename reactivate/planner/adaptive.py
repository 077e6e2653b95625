"""A plan for batches of varying shapes: one plan for each class of shapes, made when it first comes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from html import escape
from time import perf_counter
from typing import Any, Literal

from torch.nn import Module

from reactivate._inspect.arguments import example_of
from reactivate._inspect.sharded import between_steps
from reactivate._model.apply import paused
from reactivate._region.accounts import in_words, is_shortage
from reactivate._region.due import uncounted
from reactivate._text.table import Column, Row, Table
from reactivate._text.warnings import warn
from reactivate._types import Policy
from reactivate.errors import UsageError
from reactivate.planner.budget import parse
from reactivate.planner.candidates import KEEP, Assignment, Candidate
from reactivate.planner.distributed import Ranks
from reactivate.planner.plan import Plan
from reactivate.planner.planner import Planner
from reactivate.planner.progress import older_objects_left_out
from reactivate.planner.search import SharedSearch
from reactivate.planner.shapes import CallShapes
from reactivate.planner.shared_calls import SharedCalls
from reactivate.planner.step import TrainingStep
from reactivate.planner.text import seconds_in_words
from reactivate.policies._base import PerCall

MOST_SHAPES = 4096
"""The number of shapes up to which a plan remembers which of its plans serves them; beyond, it looks each time."""

_ALONE = Ranks()

PlannerOf = Callable[[Module, tuple[Any, ...], dict[str, Any]], Planner]


def adaptive_plan(planner: Planner, plan: Plan, ranks: Ranks) -> AdaptivePlan:
    """Return the plan for all shapes.

    Args:
        planner: what has planned one batch. Its arguments are not kept: they would be in memory for good.
        plan: that plan.
        ranks: those that have made it, and train, together.
    """
    if plan.proof.method == "real":
        raise UsageError(
            'plan(shapes="adaptive"): this step cannot be simulated, not even with the values that a real one has told, and '
            "plans for other shapes are made by simulation. Plan the longest batch."
        )
    step, target, optimizer, profiled = planner.step, planner.target, planner.optimizer, planner.profile
    loss, caller, ranks = step.loss, step.caller, ranks.apart()

    def planner_of(model: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Planner:
        own = TrainingStep(model, args, kwargs, loss, caller=caller)
        return Planner(own, target, optimizer, lambda text: None, known=profiled, ranks=ranks)

    call, calls = (step.model, step.args, dict(step.kwargs or {})), SharedCalls(ranks)
    shapes = calls.shapes_of(*call)
    found = AdaptivePlan(replace(plan, runner=None), shapes, planner_of, ranks, calls)
    if all(ranks.gather(shapes == CallShapes.of(*call))):  # otherwise this plan was proved for less on one of them
        found.enter(shapes, plan)
    return found


@dataclass(frozen=True, repr=False, eq=False)
class AdaptivePlan(PerCall):
    """A policy that fits each batch into the budget with as little recomputation as its own shapes need.

    Give it to `apply`, as a `Plan`. When the model is called with shapes of a class that has no plan yet, a plan is made: on
    fake tensors, from the costs that were measured once. A class is made of the shapes that are equal in sixteenths of each
    dimension of the profiled batch, rounded up. A plan that was proved for shapes serves smaller ones of its class; one that
    recomputes nothing, smaller ones of any class.

    Ranks that have planned together have one plan for a call: that of the largest shapes that one of them has.

    Printed, it is a table of the classes so far.

    Attributes:
        profiled: the plan for the batch that was profiled.
        calls: of the ranks that have this plan.
    """

    profiled: Plan
    _shapes: CallShapes
    _planner: PlannerOf | None
    _ranks: Ranks = _ALONE
    calls: SharedCalls = SharedCalls(_ALONE)  # noqa: RUF009
    _known: dict[CallShapes, ShapePlan] = field(default_factory=dict)
    _recent: list[ShapePlan] = field(default_factory=list)  # one, once the model was called

    @property
    def can_plan(self) -> bool:
        """Return whether plans for other shapes can be made: not from a file."""
        return self._planner is not None

    @property
    def recent_bytes(self) -> int:
        """The peak of the plan for the last call, all included."""
        return self._recent[0].peak_bytes if self._recent else self.profiled.predicted.peak_bytes

    @property
    def is_shared(self) -> bool:
        """Return whether other ranks have the same plans, and make them together with this one."""
        return not self._ranks.is_alone

    def within(self, budget_bytes: int, *, is_tighter: bool = True) -> AdaptivePlan:
        """Return this with another budget, and of the plans so far those that hold it.

        Args:
            is_tighter: whether one of the ranks has less than before: then they plan anew.
        """
        profiled = replace(self.profiled, budget=f"{budget_bytes}B", budget_bytes=budget_bytes)
        known = {shapes: found for shapes, found in self._known.items() if found.peak_bytes <= budget_bytes}
        if self.is_shared:
            known = {} if is_tighter else dict(self._known)
        return replace(self, profiled=profiled, _known=known, _recent=[])

    @property
    def budget_bytes(self) -> int:
        """The most that may be allocated at any moment, all included."""
        return self.profiled.budget_bytes

    @property
    def classes(self) -> tuple[ShapePlan, ...]:
        """The plans so far, in the order in which they were made."""
        return tuple({id(found): found for found in self._known.values()}.values())

    def _default_check(self) -> Literal["metadata"]:
        return "metadata"

    def __repr__(self) -> str:
        return f"AdaptivePlan({self.profiled.made_for.model} in {in_words(self.budget_bytes)})"

    def __str__(self) -> str:
        return f"{self._title()}\n\n{table_of(self.classes).text().strip()}"

    def _repr_html_(self) -> str:
        return f"<p>{escape(self._title())}</p>{table_of(self.classes).html()}"

    def _title(self) -> str:
        return f"{self!r}. Classes of shapes so far: {len(self.classes)}."

    def __deepcopy__(self, memo: dict[int, Any]) -> AdaptivePlan:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        again = functools.partial(AdaptivePlan, _planner=None, _known=self._known)  # without the step, as a plan
        return again, (self.profiled, self._shapes)

    def _applied_to(self, model: Module) -> Callable[[], None]:
        return self.profiled._applied_to(model)

    def of_call(self, model: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Policy | None:
        found = self._found(model, args, kwargs)
        self._recent[:] = [found]
        return found.policy

    def of_batch(self, model: Module, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Plan:
        """Return the plan for one batch, as `plan` does, from the costs that were measured: nothing runs.

        Args:
            model: the model that was planned, or a copy.
            args: as for `plan`.
            kwargs: as for `plan`.

        Raises:
            PlanInfeasible: there is none.
            UsageError: this was unpickled, so that there is no step to plan for.
        """
        args, kwargs = example_of("of_batch", model, args, kwargs)
        began = perf_counter()
        with paused(model), older_objects_left_out():
            found = self._planner_of(model, args, kwargs or {}).prepare().plan(parse(self.budget_bytes))
        return replace(found, planning_seconds=perf_counter() - began)

    def enter(self, shapes: CallShapes, plan: Plan) -> None:
        """Take in the plan for a batch."""
        seconds = plan.predicted.seconds - plan.plain.seconds
        known = plan.assignment.candidates, plan.plain.peak_bytes, plan.predicted.peak_bytes
        self._known[shapes] = ShapePlan(shapes, *known, True, seconds, plan.planning_seconds)

    # -- the plans of classes -----------------------------------------------------------------------------------------

    def _found(self, model: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShapePlan:
        shapes = self.calls.shapes_of(model, args, kwargs)
        found = self._known.get(shapes)
        if found is None:
            found = next((one for one in self.classes if self._serves(one, shapes)), None)
            is_new = found is None
            found = found or self._planned(shapes, model, args, kwargs)
            if is_new or len(self._known) < MOST_SHAPES:
                self._known[shapes] = found
        return found

    def _serves(self, plan: ShapePlan, shapes: CallShapes) -> bool:
        if not plan.shapes.holds(shapes):
            return False
        return (plan.recomputed == 0 and plan.holds) or plan.shapes.class_in(self._shapes) == shapes.class_in(
            self._shapes
        )

    def _planner_of(self, model: Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Planner:
        if self._planner is None:
            raise UsageError(
                "This plan was unpickled and has no step to plan for, and none of its plans is for inputs of shape "
                f'{CallShapes.of(model, args, kwargs)}. Plan again: plan(..., shapes="adaptive").'
            )
        return self._planner(model, args, dict(kwargs))

    @uncounted()
    def _planned(self, shapes: CallShapes, model: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShapePlan:
        began = perf_counter()
        with paused(model), older_objects_left_out(), between_steps(model), self._ranks.together():
            planner = self._planner_of(model, *shapes.padded(args, kwargs))
            self._trace_plain(planner, shapes)
            candidates, peak_bytes, seconds = self._chosen(planner)
            holds = all(self._ranks.gather(peak_bytes <= self.budget_bytes))
        plain_bytes = planner.fixed.total + planner.plain.peak_bytes
        if peak_bytes > self.budget_bytes:
            warn(
                f"No plan keeps a step with inputs of shape {shapes} within the budget of {in_words(self.budget_bytes)}: the "
                f"least takes {in_words(peak_bytes)}, and is taken."
            )
        return ShapePlan(shapes, candidates, plain_bytes, peak_bytes, holds, seconds, perf_counter() - began)

    def _chosen(self, planner: Planner) -> tuple[dict[str, Candidate], int, float]:
        """Return the fastest candidates with which a step holds the budget, its peak, and the time that they take.

        If none holds it, those with the least peak. With other ranks: of all that hold the budgets of all.

        Args:
            planner: has looked at the plain step.
        """
        total, plain_bytes = planner.fixed.total, planner.plain.needed_bytes
        own_bytes = self.budget_bytes - total
        if all(self._ranks.gather(plain_bytes <= own_bytes)):
            return dict.fromkeys(planner.units, KEEP), total + plain_bytes, 0.0
        search = SharedSearch(self._ranks, planner.tabulate().search, own_bytes, plain_bytes)
        found = search.fit() or search.smallest()
        return found.candidates, total + found.trace.needed_bytes, found.solution.seconds

    @staticmethod
    def _trace_plain(planner: Planner, shapes: CallShapes) -> None:
        try:
            planner.trace_plain()
        except Exception as error:
            if is_shortage(error):
                raise
            cause = error.__cause__ or error
            raise UsageError(
                f'plan(shapes="adaptive"): the step does not run with inputs of shape {shapes}: '
                f"{type(cause).__name__}: {cause}. A loss with fixed targets cannot follow the batch: write "
                "loss= so that it makes targets of the output's shape."
            ) from error


@dataclass(frozen=True)
class ShapePlan:
    """The plan for the batches of one class of shapes.

    Attributes:
        shapes: the largest ones that it was proved for.
        candidates: by the paths of units.
        plain_bytes: the peak of the plain step with them, all included.
        peak_bytes: the peak with this plan, all included.
        holds: whether that is within the budget, on all ranks.
        seconds: the time that the step takes longer than the plain one.
        planning_seconds: the time that it took to find out.
    """

    shapes: CallShapes
    candidates: Mapping[str, Candidate]
    plain_bytes: int
    peak_bytes: int
    holds: bool
    seconds: float
    planning_seconds: float

    @functools.cached_property
    def policy(self) -> Assignment | None:
        """The policy; None where everything is kept."""
        return Assignment(self.candidates) if self.recomputed else None

    @property
    def recomputed(self) -> int:
        """Return the number of units that are not kept as they are."""
        return sum(candidate != KEEP for candidate in self.candidates.values())


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
                f"{plan.recomputed} of {len(plan.candidates)} blocks" if plan.recomputed else "nothing",
                in_words(plan.peak_bytes),
                in_words(plan.plain_bytes),
                seconds_in_words(plan.seconds),
                seconds_in_words(plan.planning_seconds),
            ]
        )
        for plan in plans
    ]
    return Table(_COLUMNS, rows)

"""The runner of a plan: as long as the step is there, it runs it and predicts other shapes."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch.nn import Module

from reactivate._model.apply import apply, paused
from reactivate._region.due import uncounted
from reactivate.errors import UsageError
from reactivate.planner.budget import Budget
from reactivate.planner.call_watch import CallWatch
from reactivate.planner.collector import older_objects_left_out
from reactivate.planner.compiled_step import compiled_step
from reactivate.planner.measurement import Measurement
from reactivate.planner.peak_watch import PeakWatch
from reactivate.planner.place import Place
from reactivate.planner.plan import Plan
from reactivate.planner.profile.costs import measured_peak, seconds_of
from reactivate.planner.profile.trace import Costs
from reactivate.planner.profile.tracer import traced
from reactivate.planner.step import TrainingStep

_TIMED = 3


class Replanner(Protocol):
    """A planner of a step that it has profiled.

    Attributes:
        is_shared: whether several ranks plan together.
    """

    is_shared: bool

    def plan(self, asked: Budget | None) -> Plan:
        """Return the plan for a budget."""

    def smallest_bytes(self) -> int:
        """Return the least budget for which there is a plan."""


class StepRunner:
    """The step of a plan.

    Args:
        step: the step.
        place: where it runs.
        costs: what its ops cost.
        planner: plans it for other budgets.
    """

    def __init__(self, step: TrainingStep, place: Place, costs: Costs, planner: Replanner) -> None:
        self._step = step
        self._place = place
        self._costs = costs
        self._planner = planner

    @property
    def is_shared(self) -> bool:
        """Return whether several ranks plan together: each must come to `replan` and `least_bytes` with the others."""
        return self._planner.is_shared

    @property
    def device_bytes(self) -> int:
        """The memory of the device; 0 where nobody says."""
        return self._place.memory_bytes

    def replan(self, budget: Budget | None) -> Plan:
        """Return the plan for another budget."""
        with paused(self._step.model), older_objects_left_out():
            return self._planner.plan(budget)

    def least_bytes(self) -> int:
        """Return the least budget for which there is a plan."""
        with paused(self._step.model), older_objects_left_out():
            return self._planner.smallest_bytes()

    @uncounted()
    def measure(self, plan: Plan, *, compiled: bool | str = False) -> Measurement:
        """Run the step with `plan`: once to warm up, once for its peak, then for its time; compiled if that is asked for."""
        if not self._place.is_here:
            raise UsageError(
                f"measure: the plan is for {plan.made_for.device}, or a model without values; nothing can run."
            )
        device = self._place.device
        peaks: list[int] = []
        seconds: list[float] = []
        step = compiled_step(self._step, compiled) if compiled else self._step
        with paused(self._step.model), apply(self._step.model, plan.assignment):
            step.run_for_real()
            step.run_for_real(watch=lambda run: peaks.append(measured_peak(run, device)))
            step.run_for_real(_TIMED, watch=lambda run: seconds.append(seconds_of(run, device)))
        return Measurement(
            plan.budget_bytes,
            plan.predicted.peak_bytes,
            plan.fixed.total + peaks[0],
            plan.predicted.peak_bytes - plan.fixed.total,
            plan.predicted.seconds,
            statistics.median(seconds),
            None if device.type == "cpu" else int(torch.accelerator.max_memory_reserved()),
            plan.predicted.reserved_bytes,
            is_compiled=bool(compiled),
        )

    def watch(self, model: Module, plan: Plan) -> Callable[[], None]:
        """Warn when `model` is called with other shapes than the plan was made for, or takes more than its budget."""
        if self._step.whole is not None:
            return lambda: None  # whose arguments nobody knows
        remove = model.register_forward_pre_hook(CallWatch(plan, self.peak_with), with_kwargs=True).remove
        if not plan.proof.margin_bytes or self._place.device.type == "cpu":
            return remove
        peak = model.register_forward_pre_hook(PeakWatch(plan.budget_bytes, self._place.device))

        def remove_both() -> None:
            remove()
            peak.remove()

        return remove_both

    def peak_with(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
        """The peak of a step with these arguments, under the policy that is applied; None if it cannot be simulated."""
        step = replace(self._step, args=args, kwargs=kwargs)
        try:
            with step.on_fakes(self._place.device) as (run, known), traced({}, known, self._costs) as trace:
                run()
        except Exception:  # of the user's loss, say, which has targets of another shape: the warning has no peak then
            return None
        return trace.peak_bytes

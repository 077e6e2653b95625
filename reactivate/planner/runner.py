"""The step of a plan, as long as it is there: run to measure the plan, or compiled, or planned again."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn import Module

from reactivate._model.apply import apply, paused
from reactivate._region.accounts import in_words
from reactivate._region.due import uncounted
from reactivate.errors import MutationError, UsageError
from reactivate.planner.budget import Budget
from reactivate.planner.candidates import Assignment
from reactivate.planner.compiled import CompiledModules, check_compiled, uncompiled
from reactivate.planner.contents import PlanContents
from reactivate.planner.cost.measured import time_call
from reactivate.planner.cost.memory import fixed_memory
from reactivate.planner.cost.stretches import measured_peak
from reactivate.planner.infeasible import refused_later
from reactivate.planner.progress import older_objects_left_out
from reactivate.planner.step import BLOCKS, Beginning, TrainingStep
from reactivate.planner.target import Target
from reactivate.planner.trace.records import Costs
from reactivate.planner.trace.refused import refused_in
from reactivate.planner.trace.tracer import traced
from reactivate.planner.watches import CallWatch, PeakWatch

_TIMED = 3


@dataclass(frozen=True, eq=False)
class StepRunner:
    """The step of a plan, as long as it is there.

    Attributes:
        step, target, costs: the step, where it runs, and what its ops cost.
        is_shared: whether several ranks plan together: each must come to `replan` and `least_bytes` with the others.
        plan: returns the plan for another budget.
        smallest_bytes: returns the least budget for which there is a plan.
        refused: the paths of the regions that cannot be recomputed; no further plan has one of these.
    """

    step: TrainingStep
    target: Target
    costs: Costs
    is_shared: bool
    plan: Callable[[Budget | None], Any]
    smallest_bytes: Callable[[], int]
    refused: set[str]

    def replan(self, budget: Budget | None) -> Any:
        """Return the plan for another budget."""
        with self._planning():
            return self.plan(budget)

    def least_bytes(self) -> int:
        """Return the least budget for which there is a plan."""
        with self._planning():
            return self.smallest_bytes()

    @contextmanager
    def _planning(self) -> Iterator[None]:
        with paused(self.step.model), older_objects_left_out(), uncompiled():
            try:
                yield
            finally:
                if self.step.compiled == BLOCKS:
                    torch.compiler.reset()  # so that what was tried does not count against what the user compiles

    @uncounted()
    def measure(self, plan: PlanContents, policy: Assignment, *, compiled: bool | str = False) -> Measurement:
        """Run the step with the policy of `plan`, maybe compiled: to warm up, for its peak, then for its time."""
        if not self.target.is_here:
            raise UsageError(
                f"measure: the plan is for {plan.made_for.device}, or a model without values; nothing can run."
            )
        device = self.target.device
        peaks: list[int] = []
        seconds: list[float] = []
        step = self.step
        with paused(step.model), apply(step.model, policy), self._running(compiled):
            step.run_for_real()
            step.run_for_real(watch=lambda run: peaks.append(measured_peak(run, device)))
            try:
                step.run_for_real(_TIMED, watch=lambda run: seconds.append(time_call(run, device)))
            except MutationError as error:  # of a step that comes after the planned one
                self._note_refused(plan, policy, error)
                raise
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

    def _note_refused(self, plan: PlanContents, policy: Assignment, error: MutationError) -> None:
        """Let no further plan recompute what a later step refuses, and say so. Nothing if the error is not about that."""
        refused = refused_in(functools.partial(self.step.run_for_real, _TIMED)).intersection(policy.regions)
        if refused:
            self.refused.update(refused)
            raise MutationError(refused_later(sorted(refused), plan.budget)) from error

    def _running(self, compiled: bool | str) -> AbstractContextManager[Any]:
        """Return a context in which the step runs compiled, or as it is."""
        if not compiled:
            return nullcontext()
        check_compiled("measure", compiled)
        if self.step.whole is not None:
            raise UsageError(
                "measure(compiled=...): the step of this plan is a function of yours, which calls the model as it is. "
                "Compile the model in it, and measure without compiled=; or plan with args and loss=."
            )
        torch.compiler.reset()  # it would take the graphs of one plan for those of another
        return CompiledModules(self.step.model, compiled).running()

    def watch(self, model: Module, plan: PlanContents) -> Callable[[], None]:
        """Warn when `model` is called with other shapes than the plan was made for, or takes more than its budget."""
        if self.step.whole is not None:
            return lambda: None  # whose arguments are unknown
        hooks = ExitStack()
        hooks.callback(model.register_forward_pre_hook(CallWatch(plan, self.peak_with), with_kwargs=True).remove)
        if plan.proof.margin_bytes and self.target.device.type != "cpu":
            watch = PeakWatch(plan.budget_bytes, self.target.device)
            hooks.callback(model.register_forward_pre_hook(watch).remove)
        return hooks.close

    def peak_with(self, model: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
        """The peak of a step with this model and these arguments, which count; None if it cannot be simulated.

        Args:
            model: what the plan is applied to, maybe a copy of the planned one.
        """
        step = replace(self.step, args=args, kwargs=kwargs)
        if model is not step.model:  # what is known of calls, and what a step begins with, is of the planned one
            step = replace(step, model=model, known={}, beginning=Beginning())
        try:
            with step.on_tensors(self.target.device) as (run, known), traced({}, known, self.costs) as trace:
                run()
        except Exception:  # of the user's loss, say, which has targets of another shape: the warning has no peak then
            return None
        return fixed_memory(step).inputs + trace.peak_bytes


# -- a measurement ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measurement:
    """A prediction beside its measurement.

    Attributes:
        budget_bytes: what was allowed.
        predicted_bytes: the peak that the plan says, all included.
        measured_bytes: the peak that was found.
        activation_bytes: what of that the step allocates itself.
        predicted_seconds: of forward and backward.
        measured_seconds: of the same.
        reserved_bytes: what an accelerator's allocator had taken from the device; None on a CPU.
        predicted_reserved_bytes: what the plan says of that; None on a CPU, and of plans in older files.
        is_compiled: whether the model was compiled.
    """

    budget_bytes: int
    predicted_bytes: int
    measured_bytes: int
    activation_bytes: int
    predicted_seconds: float
    measured_seconds: float
    reserved_bytes: int | None = None
    predicted_reserved_bytes: int | None = None
    is_compiled: bool = False

    @property
    def holds(self) -> bool:
        """Return whether the budget was kept."""
        return self.measured_bytes <= self.budget_bytes

    @property
    def error(self) -> float:
        """Return how far the measured peak is above the predicted one, as a part of the step's own peak; negative: below."""
        return (self.measured_bytes - self.predicted_bytes) / max(self.activation_bytes, 1)

    def __str__(self) -> str:
        step = "Compiled step" if self.is_compiled else "Step"
        predicted, reserved = map(_reserved, (self.predicted_reserved_bytes, self.reserved_bytes))
        return (
            f"Peak: predicted {in_words(self.predicted_bytes)}{predicted}, measured {in_words(self.measured_bytes)}{reserved}"
            f" ({self.error:+.2%} of the activations), {'within' if self.holds else 'above'} the budget of "
            f"{in_words(self.budget_bytes)}. {step}: predicted {self.predicted_seconds:.3f} s, measured "
            f"{self.measured_seconds:.3f} s."
        )


def _reserved(size_bytes: int | None) -> str:
    return "" if size_bytes is None else f" ({in_words(size_bytes)} reserved)"

"""The runner of a plan: as long as the step is there, it runs it and predicts other shapes."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.compiler import is_compiling
from torch.nn import Module

from reactivate._engine.accounts import in_words
from reactivate._engine.current import is_recomputing
from reactivate._engine.mismatch.calls import uncounted
from reactivate._inspect.step import leaves_of
from reactivate._model.apply import apply, paused
from reactivate._model.handle import Handle
from reactivate._text.warnings import warn
from reactivate.errors import UsageError
from reactivate.planner.budget import Budget
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
Shapes = tuple[tuple[int, ...], ...]


class StepRunner:
    """The step of a plan.

    Args:
        step: the step.
        place: where it runs.
        costs: what its ops cost.
        replan: from another budget to its plan.
    """

    def __init__(self, step: TrainingStep, place: Place, costs: Costs, replan: Callable[[Budget | None], Plan]) -> None:
        self._step = step
        self._place = place
        self._costs = costs
        self._replan = replan

    @property
    def device_bytes(self) -> int:
        """The memory of the device; 0 where nobody says."""
        return self._place.memory_bytes

    def replan(self, budget: Budget | None) -> Plan:
        """Return the plan for another budget."""
        with paused(self._step.model):
            return self._replan(budget)

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
        remove = model.register_forward_pre_hook(_Watch(plan, self), with_kwargs=True).remove
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
        except Exception:  # a loss, say, that has targets of the other shape
            return None
        return trace.peak_bytes


class _Watch:
    """Looks at the shapes that a model is called with, each once."""

    def __init__(self, plan: Plan, runner: StepRunner | None) -> None:
        self._plan = plan
        self._runner = runner
        self._known = {tuple(shape for _, shape, _ in plan.made_for.inputs)}

    def __reduce__(self) -> tuple[Any, ...]:
        return _Watch, (self._plan, None)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Watch:
        return _Watch(self._plan, None)

    def __call__(self, model: Module, args: Any, kwargs: Any) -> None:
        if is_compiling() or is_recomputing() or not torch.is_grad_enabled():
            return
        shapes = _shapes_of(args, kwargs)
        if shapes in self._known:
            return
        handle = Handle.of(model)
        if handle is None or handle.policy != self._plan:  # while the model is planned or measured
            return
        self._known.add(shapes)
        warn(self._words(shapes, args, kwargs))

    def _words(self, shapes: Shapes, args: Any, kwargs: Any) -> str:
        plan = self._plan
        planned = tuple(shape for _, shape, _ in plan.made_for.inputs)
        said = (
            f"This plan was made for inputs of shape {_list(planned)}, and the model is called with {_list(shapes)}. "
        )
        can_tell = self._runner is not None and not plan.storages  # how long these leave tensors in memory
        peak = self._runner.peak_with(args, dict(kwargs)) if self._runner is not None and can_tell else None
        if peak is None:
            return said + f"Its budget of {in_words(plan.budget_bytes)} is not promised for these: plan again."
        total = plan.fixed.total + peak
        verdict = "still holds" if total <= plan.budget_bytes else "does not hold: plan again"
        return said + f"The peak will be {in_words(total)}; the budget of {in_words(plan.budget_bytes)} {verdict}."


def _shapes_of(args: Any, kwargs: Any) -> Shapes:
    leaves = leaves_of("args", tuple(args)) | leaves_of("kwargs", dict(kwargs))
    return tuple(tuple(leaf.shape) for leaf in leaves.values())


def _list(shapes: Shapes) -> str:
    return ", ".join(map(str, shapes)) or "none"

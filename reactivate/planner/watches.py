"""Watches on a model with a plan: whether it is called as planned, and whether a step keeps to the budget."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.compiler import is_compiling
from torch.nn import Module

from reactivate._model.handle import Handle
from reactivate._passes.current import is_recomputed
from reactivate._region.accounts import in_words
from reactivate._text.warnings import warn
from reactivate._torch.dynamo import is_jit_tracing
from reactivate.planner.contents import Circumstances, PlanContents
from reactivate.planner.shapes import call_inputs
from reactivate.planner.target import device_spec
from reactivate.planner.units import module_class_name

Peak = Callable[[Module, tuple[Any, ...], dict[str, Any]], int | None]
Shapes = tuple[tuple[int, ...], ...]


class CallWatch:
    """Warns at the first call of a model that is not as planned, and at the first one with each other shape.

    Args:
        peak_with: from a model and arguments to the peak of their step, the arguments included; None for a plan from a
            file, which may be on another device and another model.
    """

    def __init__(self, plan: PlanContents, peak_with: Peak | None, *, is_from_file: bool = False) -> None:
        self._plan = plan
        self._peak_with = peak_with
        self._is_from_file = is_from_file
        self._is_checked = False
        self._known = {tuple(shape for _, shape, _ in plan.made_for.inputs)}

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial(CallWatch, is_from_file=True), (self._plan, None)

    def __deepcopy__(self, memo: dict[int, Any]) -> CallWatch:
        return CallWatch(self._plan, None, is_from_file=self._is_from_file)

    def __call__(self, model: Module, args: Any, kwargs: Any) -> None:
        """The model is called."""
        if is_compiling() or is_jit_tracing() or is_recomputed() or not torch.is_grad_enabled():
            return
        shapes = tuple(tuple(leaf.shape) for leaf in call_inputs(args, kwargs).values())
        if self._is_checked and shapes in self._known:
            return
        handle = Handle.of(model)
        policy: object = None if handle is None else handle.policy
        if policy != self._plan:  # while the model is planned or measured
            return
        if not self._is_checked:
            self._is_checked = True
            differences = list(self._differences(model))
            if differences:
                warn(f"This plan was made for {'; '.join(differences)}. It predicts nothing for this: plan again.")
        if shapes not in self._known:
            self._known.add(shapes)
            warn(self._about_shapes(model, shapes, args, kwargs))

    def _differences(self, model: Module) -> Iterator[str]:
        made_for = self._plan.made_for
        if model.training and not made_for.trains:
            yield f"a model in {made_for.mode}, and this one is in training mode"
        if not self._is_from_file:
            return
        if made_for.model != module_class_name(model):
            yield f"a {made_for.model}, and this is a {module_class_name(model)}"
        device = next((parameter.device for parameter in model.parameters()), None)
        if device is not None and not _is_on(device, made_for):
            yield f"{made_for.device}, and the model is on {device}"

    def _about_shapes(self, model: Module, shapes: Shapes, args: Any, kwargs: Any) -> str:
        plan = self._plan
        planned = tuple(shape for _, shape, _ in plan.made_for.inputs)
        made_for = f"This plan was made for inputs of shape {_list(planned)}"
        said = f"{made_for}, and the model is called with {_list(shapes)}. "
        # How long a storage leaves tensors in memory is not simulated here.
        peak = None if self._peak_with is None or plan.storages else self._peak_with(model, args, dict(kwargs))
        if peak is None:
            budget = in_words(plan.budget_bytes)
            return said + f"Whether its budget of {budget} holds for these was not predicted: plan again."
        total = plan.fixed.total - plan.fixed.inputs + peak
        verdict = "still holds" if total <= plan.budget_bytes else "does not hold: plan again"
        return said + f"The peak will be {in_words(total)}; the budget of {in_words(plan.budget_bytes)} {verdict}."


def _is_on(device: torch.device, made_for: Circumstances) -> bool:
    """Return whether a device is the one of a plan, as far as that can be told: many have no name in the table."""
    if not made_for.is_predicted:
        return torch.device(made_for.device).type == device.type
    known = device_spec(device).name
    return known == made_for.device or (known == "cpu" != device.type)


def _list(shapes: Shapes) -> str:
    return ", ".join(map(str, shapes)) or "none"


class PeakWatch:
    """Warns once, at the call of the model after the step that took more than the plan's budget."""

    def __init__(self, budget_bytes: int, device: torch.device) -> None:
        self._budget_bytes = budget_bytes
        self._device = device
        self._known_bytes = max(budget_bytes, self._peak_bytes())  # what went on before the plan is not the plan's

    def __reduce__(self) -> tuple[Any, ...]:
        return PeakWatch, (self._budget_bytes, self._device)

    def _peak_bytes(self) -> int:
        return int(torch.accelerator.max_memory_allocated(self._device))

    def __call__(self, model: Module, args: Any) -> None:
        """The model is called."""
        if self._known_bytes < 0 or not torch.is_grad_enabled():
            return
        peak_bytes = self._peak_bytes()
        if peak_bytes > self._known_bytes:
            self._known_bytes = -1
            warn(
                f"A step took {in_words(peak_bytes)}, and the plan's budget is {in_words(self._budget_bytes)}: sizes in this "
                "model depend on its data, and those of the batch that was planned were smaller. Plan with that batch, or "
                f"with a budget that is smaller by {in_words(peak_bytes - self._budget_bytes)}."
            )

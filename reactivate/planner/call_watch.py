"""Watches whether a model with a plan is called as in the step that the plan was made for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.compiler import is_compiling
from torch.nn import Module

from reactivate._inspect.step import leaves_of
from reactivate._model.handle import Handle
from reactivate._passes.current import is_recomputing
from reactivate._region.accounts import in_words
from reactivate._text.warnings import warn
from reactivate.planner.digest import class_name_of
from reactivate.planner.place import spec_of
from reactivate.planner.planned import Circumstances, Planned

Peak = Callable[[tuple[Any, ...], dict[str, Any]], int | None]
Shapes = tuple[tuple[int, ...], ...]


class CallWatch:
    """Warns at the first call of a model that is not as planned, and at the first one with each other shape.

    Args:
        plan: the plan.
        peak_with: from arguments to the peak of their step; None for a plan from a file, which may be on another device and
            another model.
    """

    def __init__(self, plan: Planned, peak_with: Peak | None, *, is_from_file: bool = False) -> None:
        self._plan = plan
        self._peak_with = peak_with
        self._is_from_file = is_from_file
        self._is_checked = False
        self._known = {tuple(shape for _, shape, _ in plan.made_for.inputs)}

    def __reduce__(self) -> tuple[Any, ...]:
        return _again, (self._plan,)

    def __deepcopy__(self, memo: dict[int, Any]) -> CallWatch:
        return CallWatch(self._plan, None, is_from_file=self._is_from_file)

    def __call__(self, model: Module, args: Any, kwargs: Any) -> None:
        """The model is called."""
        if is_compiling() or is_recomputing() or not torch.is_grad_enabled():
            return
        shapes = _shapes_of(args, kwargs)
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
                warn(f"This plan was made for {'; '.join(differences)}. Its promise is not for this: plan again.")
        if shapes not in self._known:
            self._known.add(shapes)
            warn(self._about_shapes(shapes, args, kwargs))

    def _differences(self, model: Module) -> Iterator[str]:
        made_for = self._plan.made_for
        if model.training and not made_for.trains:
            yield f"a model in {made_for.mode}, and this one is in training mode"
        if not self._is_from_file:
            return
        if made_for.model != class_name_of(model):
            yield f"a {made_for.model}, and this is a {class_name_of(model)}"
        device = next((parameter.device for parameter in model.parameters()), None)
        if device is not None and not _is_on(device, made_for):
            yield f"{made_for.device}, and the model is on {device}"

    def _about_shapes(self, shapes: Shapes, args: Any, kwargs: Any) -> str:
        plan = self._plan
        planned = tuple(shape for _, shape, _ in plan.made_for.inputs)
        said = (
            f"This plan was made for inputs of shape {_list(planned)}, and the model is called with {_list(shapes)}. "
        )
        # Nobody knows how long a storage leaves tensors in memory.
        peak = None if self._peak_with is None or plan.storages else self._peak_with(args, dict(kwargs))
        if peak is None:
            return said + f"Its budget of {in_words(plan.budget_bytes)} is not promised for these: plan again."
        total = plan.fixed.total + peak
        verdict = "still holds" if total <= plan.budget_bytes else "does not hold: plan again"
        return said + f"The peak will be {in_words(total)}; the budget of {in_words(plan.budget_bytes)} {verdict}."


def watching_loaded(model: Module, plan: Planned) -> Callable[[], None]:
    """Watch a model with a plan from a file. Returns what ends that."""
    return model.register_forward_pre_hook(CallWatch(plan, None, is_from_file=True), with_kwargs=True).remove


def _again(plan: Planned) -> CallWatch:
    return CallWatch(plan, None, is_from_file=True)


def _is_on(device: torch.device, made_for: Circumstances) -> bool:
    """Return whether a device is the one of a plan, as far as that can be told: many have no name in the table."""
    if not made_for.is_predicted:
        return torch.device(made_for.device).type == device.type
    known = spec_of(device).name
    return known == made_for.device or (known == "cpu" != device.type)


def _shapes_of(args: Any, kwargs: Any) -> Shapes:
    leaves = leaves_of("args", tuple(args)) | leaves_of("kwargs", dict(kwargs))
    return tuple(tuple(leaf.shape) for leaf in leaves.values())


def _list(shapes: Shapes) -> str:
    return ", ".join(map(str, shapes)) or "none"

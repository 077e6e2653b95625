"""Differences between a model and the one that a plan was made for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch.nn import Module

from reactivate._modules.paths import THE_MODEL
from reactivate._modules.spans import span_at
from reactivate.planner.digest import class_name_of, digest_of
from reactivate.planner.planned import Decision
from reactivate.planner.units import units_of


def differences_of(model: Module, units: int, decisions: Sequence[Decision]) -> Iterator[str]:
    """Say what of a model is other than a plan knows it.

    Args:
        model: the model.
        units: how many units it had; 0 where nobody knows.
        decisions: of the plan.
    """
    found = len(units_of(model))
    if units and found != units:
        yield f"it has {found} blocks and other modules that contain modules, and the planned model had {units}"
    modules = dict(model.named_modules())
    for decision in decisions:
        module = modules.get(decision.path) or span_at(model, decision.path)
        where = repr(decision.path or THE_MODEL)
        if module is None:
            yield f"it has no {where}"
        elif class_name_of(module) != decision.kind:
            yield f"{where} is a {class_name_of(module)} and was a {decision.kind}"
        elif digest_of(module) != decision.parameters:
            yield f"{where} has other parameters"

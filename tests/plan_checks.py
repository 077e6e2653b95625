"""Plans of a case, and checks that a real step holds what its plan has said."""

from __future__ import annotations

from typing import Any

import torch
from memory import allocated_by
from oracle import assert_bitwise
from plan_models import Case
from torch import Tensor, nn

import reactivate
from reactivate.planner.plan import Plan


def planned(case: Case, budget: int | str = "60%", **options: Any) -> Plan:
    return reactivate.plan(case.model, case.args, case.kwargs, budget=budget, loss=case.loss, **options)


def assert_all_bitwise(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    for name, item in one.items():
        assert_bitwise(item, other[name], name)


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: item.grad.clone() for name, item in model.named_parameters()}


def peak_of(case: Case, plan: Plan | None, step: Any = None) -> int:
    """Return what a step allocates at most, above what is there before."""
    for parameter in case.model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    handle = None if plan is None else reactivate.apply(case.model, plan)
    (step or case.step)()
    peak = allocated_by(step or case.step).peak_bytes
    if handle is not None:
        handle.remove()
    case.model.zero_grad()
    return peak


def assert_holds(case: Case, plan: Plan) -> None:
    """The real step stays within the budget, is as large as was said, and comes to the same gradients."""
    peak = peak_of(case, plan)
    assert plan.fixed.total + peak <= plan.budget_bytes
    own = plan.plain.peak_bytes - plan.fixed.total
    assert abs(plan.predicted.peak_bytes - plan.fixed.total - peak) <= 0.01 * own
    assert len(repr(plan.predicted)) < 400, "it is no list of every moment"
    assert peak < own
    verdict = reactivate.verify(case.model, case.args, case.kwargs, policy=plan)
    assert verdict and verdict.regions > 0

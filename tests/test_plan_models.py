"""Plans keep their promise: the peak of the real step, its gradients, the least budget, on every kind of model."""

from __future__ import annotations

import weakref

import pytest
import torch
from memory import allocated_by
from plan_models import MODELS, Case
from torch import Tensor

import reactivate
from reactivate.errors import PlanInfeasible
from reactivate.planner.plan import Plan

BUDGETS = ("90%", "75%", "50%", "35%", "25%")


def measured(case: Case, plan: Plan | None) -> int:
    """Return what a step allocates at most, above what is there: seen by the profiler, in the way of the tests."""
    for parameter in case.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    handle = None if plan is None else reactivate.apply(case.model, plan)
    case.step()
    found = allocated_by(case.step).peak_bytes
    if handle is not None:
        handle.remove()
    for parameter in case.model.parameters():
        parameter.grad = None
    return found


def plan_or_least(first: Plan, budget: str) -> Plan | int:
    """The plan; or, where there is none, the least budget that has one."""
    try:
        return first.at(budget)
    except PlanInfeasible as error:
        return (
            error.least_bytes
            if error.least_bytes > error.budget_bytes
            else pytest.fail("a budget is refused that fits")
        )


QUICK = {"gpt", "resnet"}
EACH = [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in MODELS]


@pytest.mark.parametrize("name", EACH)
def test_every_budget_is_kept_or_refused_with_the_least(name: str) -> None:
    case = MODELS[name]()
    first = reactivate.plan(case.model, case.args, case.kwargs, budget="100%", loss=case.loss)
    plain = measured(case, None)
    assert abs(first.plain.peak_bytes - first.fixed.total - plain) <= 0.01 * plain
    seconds, kept, least = 0.0, 0, 0
    for budget in BUDGETS:
        plan = plan_or_least(first, budget)
        if isinstance(plan, int):
            least = plan
            continue
        assert not least, "a smaller budget has a plan where a larger one has none"
        peak = measured(case, plan)
        assert plan.fixed.total + peak <= plan.budget_bytes
        promised = plan.predicted.peak_bytes - plan.fixed.total
        assert abs(promised - peak) <= 0.01 * plain
        assert peak < plain
        assert plan.predicted.seconds >= seconds  # less memory takes no less time
        seconds = plan.predicted.seconds
        verdict = reactivate.verify(case.model, case.args, case.kwargs, policy=plan)
        assert verdict.is_same and verdict.regions > 0, verdict
        kept += 1
    assert kept >= 1
    if not least:
        with pytest.raises(PlanInfeasible) as caught:
            first.at(first.fixed.total + 1)
        least = caught.value.least_bytes
    smallest = first.at(least)
    assert smallest.fixed.total + measured(case, smallest) <= least
    assert reactivate.verify(case.model, case.args, case.kwargs, policy=smallest)
    with pytest.raises(PlanInfeasible) as caught:
        first.at(least - 1)
    assert caught.value.least_bytes == least


def test_nothing_waits_for_the_memory_of_an_inner_region_s_input() -> None:
    """On torch 2.9 a weak reference of C++ keeps the object of a storage, whose end tells the planner what is free."""
    gone = []

    def outer(x: Tensor) -> Tensor:
        hidden = x.sin()
        gone.append(weakref.ref(hidden.untyped_storage()))
        return reactivate.checkpoint(lambda h: h.exp().cos(), determinism="metadata")(hidden)

    out = reactivate.checkpoint(outer, determinism="metadata")(torch.randn(8, requires_grad=True))
    assert gone[0]() is None
    out.sum().backward()

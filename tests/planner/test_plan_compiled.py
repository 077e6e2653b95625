"""Plans for compiled steps: what they take beside an eager step is counted, and the compiled step that was run holds.

`aot_eager` has the graphs of the default backend, its partitioner among it, without minutes of compiling.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from plan_models import GPT
from torch import Tensor
from torch.nn import functional as F

import reactivate
from reactivate import Plan
from reactivate.errors import PlanInfeasible, UsageError
from reactivate.planner.planner import holding_compiled

TOKENS = torch.randint(64, (4, 64), generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    yield
    torch.compiler.reset()


def loss_of(logits: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), torch.zeros(256, dtype=torch.long))


def model() -> GPT:
    torch.manual_seed(0)
    return GPT(dim=64, layers=3)


def planned(net: GPT, budget: int | str, **options: Any) -> Plan:
    return reactivate.plan(net, TOKENS, budget=budget, loss=loss_of, **options)


def least_of(plan: Plan) -> int:
    with pytest.raises(PlanInfeasible) as caught:
        plan.at(1)
    return caught.value.least_bytes


def test_a_compiled_step_takes_more_than_the_eager_one_and_a_plan_for_it_holds() -> None:
    net = model()
    eager = planned(net, "100%")
    least = least_of(eager)
    tight = eager.at(least)
    assert tight.measure().holds
    found = tight.measure(compiled="aot_eager")
    assert not found.holds and "does not hold. Compiled step:" in str(found)
    with pytest.raises(PlanInfeasible):
        planned(net, least, compiled="aot_eager")
    budget = found.measured_bytes
    plan = planned(net, budget, compiled="aot_eager")
    assert plan.budget_bytes == budget and plan.proof.method == "compiled"
    assert plan.proof.peak_bytes <= budget
    assert "Proved by a compiled step" in str(plan)
    assert any(decision.candidate.recompute for decision in plan.decisions)
    again = plan.measure(compiled="aot_eager")
    assert again.holds and again.is_compiled and again.measured_bytes == plan.proof.peak_bytes


def test_all_gradients_at_once_are_counted() -> None:
    """Without a device to run on the plan is predicted, and nothing is compiled."""
    with torch.device("meta"):
        net = GPT(dim=64, layers=3)
    plans = [planned(net, "100%", compiled=compiled) for compiled in (False, True)]
    eager, compiled = (plan.at(least_of(plan)) for plan in plans)
    assert compiled.proof.method == "simulated"
    assert eager.predicted.peak_bytes < compiled.predicted.peak_bytes
    assert compiled.predicted.peak_bytes <= eager.predicted.peak_bytes + eager.fixed.gradients
    weights = [item for item in compiled.predicted.alive if item.kind == "workspace" and item.held_by == ("the step",)]
    assert sum(item.nbytes for item in weights) > 0  # gradients that stay


def test_gradients_are_those_of_the_compiled_plain_model() -> None:
    net = model()
    plan = planned(net, "70%", compiled="aot_eager")

    def gradients() -> list[Tensor]:
        torch.compiler.reset()
        net.zero_grad()
        loss_of(torch.compile(net, backend="aot_eager")(TOKENS)).backward()
        return [item.grad.clone() for item in net.parameters() if item.grad is not None]

    for item in net.modules():
        if isinstance(item, torch.nn.Dropout):
            item.p = 0.0
    expected = gradients()
    with reactivate.apply(net, plan):
        found = gradients()
    assert len(found) == len(expected) > 0 and all(map(torch.equal, found, expected))


class MeasuredCosts:
    """A measurement."""

    def __init__(self, plan: Plan, measured: int) -> None:
        self.plan, self.measured_bytes = plan, measured


def test_a_plan_is_tightened_until_its_compiled_step_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    net = model()
    first = planned(net, "80%")
    own_bytes = (
        first.budget_bytes - first.predicted.peak_bytes + 50_000
    )  # the compiler's: more than the first plan leaves
    tried: list[int] = []

    def measure(plan: Plan, *, compiled: bool | str) -> MeasuredCosts:
        tried.append(plan.predicted.peak_bytes)
        return MeasuredCosts(plan, plan.predicted.peak_bytes + own_bytes)

    monkeypatch.setattr(Plan, "measure", measure)
    found = holding_compiled(first, True, lambda budget: first.at(budget.text))
    assert len(tried) > 1 and tried == sorted(tried, reverse=True)
    assert (found.budget, found.budget_bytes) == (first.budget, first.budget_bytes)
    assert found.proof.peak_bytes == tried[-1] + own_bytes <= first.budget_bytes
    assert found.proof.rounds == len(tried)
    with pytest.raises(PlanInfeasible, match="no compiled step keeps within"):
        tight = first.at(least_of(first))
        holding_compiled(tight, True, lambda budget: tight.at(budget.text))


def test_what_a_compiled_step_cannot_have_is_refused() -> None:
    net = model()
    with pytest.raises(UsageError, match=r"plan\(compiled='fast'\): it takes True, False, or the name of a backend"):
        planned(net, "50%", compiled="fast")
    with pytest.raises(UsageError, match=r"compiled=True\) is not supported with maximize="):
        planned(net, "1GiB", compiled=True, maximize="batch")
    with pytest.raises(UsageError, match="adaptive"):
        planned(net, "1GiB", compiled=True, shapes="adaptive")
    with pytest.raises(UsageError, match=r"compiled=True\) is not supported with step="):
        reactivate.plan(net, budget="50%", step=lambda: loss_of(net(TOKENS)).backward(), compiled=True)
    whole = reactivate.plan(net, budget="100%", step=lambda: loss_of(net(TOKENS)).backward())
    with pytest.raises(UsageError, match="a function of yours"):
        whole.measure(compiled="aot_eager")

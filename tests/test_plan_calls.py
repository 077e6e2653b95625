"""Plans with a treatment for each call of a layer that a forward runs several times."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from memory import allocated_by
from plan_models import Block, Case
from torch import Tensor, nn

import reactivate
from reactivate.planner.plan import Plan
from reactivate.planner.treatments import KEEP
from reactivate.storage import Disk


class Shared(nn.Module):
    def __init__(self, calls: int = 6, width: int = 32) -> None:
        super().__init__()
        self.calls = calls
        self.block, self.last = Block(width), Block(width)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.calls):
            x = self.block(x)
        return self.last(x)


def shared(**options: Any) -> Case:
    torch.manual_seed(0)
    return Case(Shared(**options), (torch.randn(4, 64, 32),), loss=lambda out: out.square().sum())


def planned(case: Case, budget: str = "60%", **options: Any) -> Plan:
    return reactivate.plan(case.model, case.args, case.kwargs, budget=budget, loss=case.loss, **options)


def by_call(plan: Plan) -> tuple[Any, ...]:
    """Return the treatments of the calls of the shared layer."""
    (decision,) = [item for item in plan.decisions if item.path == "block"]
    return decision.treatment.calls


def peak_of(case: Case, step: Any = None) -> int:
    for parameter in case.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    (step or case.step)()
    return allocated_by(step or case.step).peak_bytes


def assert_holds(case: Case, plan: Plan, step: Any = None) -> None:
    with reactivate.apply(case.model, plan):
        peak = peak_of(case, step)
    case.model.zero_grad()
    own = plan.plain.peak_bytes - plan.fixed.total
    assert plan.fixed.total + peak <= plan.budget_bytes
    assert abs(plan.predicted.peak_bytes - plan.fixed.total - peak) <= 0.005 * own


@pytest.mark.parametrize("budget", ["85%", "60%", "35%"])
def test_some_calls_are_recomputed_and_others_kept(budget: str) -> None:
    case = shared()
    plan = planned(case, budget)
    assert len(by_call(plan)) == 6 and len(set(by_call(plan))) > 1
    assert_holds(case, plan)
    verdict = reactivate.verify(case.model, case.args, policy=plan)
    assert verdict.is_same and verdict.regions > 0


def test_a_treatment_a_call_is_faster_than_one_for_all() -> None:
    case = shared()
    plan = planned(case, "85%")
    kept = sum(call == KEEP for call in by_call(plan))
    assert kept >= 3, "one treatment for all calls would recompute all of them"
    full = next(point for point in plan.frontier if point.peak_bytes == plan.frontier[0].peak_bytes)
    assert plan.predicted.seconds < full.seconds


def test_where_all_calls_are_treated_alike_nothing_counts() -> None:
    case = shared()
    plan = planned(case, "100%")
    assert by_call(plan) == () and {item.treatment for item in plan.decisions} == {KEEP}
    handle = reactivate.apply(case.model, plan)
    assert [module for module in case.model.modules() if "forward" in vars(module)] == [case.model]  # to be found
    handle.remove()


def test_a_file_holds_the_calls(tmp_path: Path) -> None:
    case = shared()
    plan = planned(case)
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded == plan and by_call(loaded) == by_call(plan) != ()
    assert loaded.by_call() == plan.by_call()
    old = json.loads((tmp_path / "plan.json").read_text(encoding="utf-8"))
    for decision in old["decisions"]:
        del decision["treatment"]["calls"]  # as it was written before
    assert by_call(Plan.from_json(old)) == ()
    assert "calls 1" in str(plan)


def test_an_accumulation_counts_in_each_forward() -> None:
    case = shared()
    batches = [torch.randn(4, 64, 32) for _ in range(2)]

    def step() -> None:
        for batch in batches:
            case.loss(case.model(batch)).backward()

    plan = reactivate.plan(case.model, budget="60%", step=step)
    assert len(by_call(plan)) == 6
    assert_holds(case, plan, step)


def test_two_forwards_before_one_backward_have_the_same_calls() -> None:
    case = shared(calls=4)
    batches = [torch.randn(4, 64, 32) for _ in range(2)]

    def step() -> None:
        (case.model(batches[0]).square().sum() + case.model(batches[1]).square().sum()).backward()

    plan = reactivate.plan(case.model, budget="45%", step=step)
    assert len(by_call(plan)) == 4
    with reactivate.apply(case.model, plan):
        assert plan.fixed.total + peak_of(case, step) <= plan.budget_bytes


def test_calls_outside_of_the_model_have_one_treatment() -> None:
    case = shared()

    def step() -> None:
        x = case.model.block(case.args[0])
        case.loss(case.model(x)).backward()

    plan = reactivate.plan(case.model, budget="40%", step=step)
    assert by_call(plan) == ()
    assert_holds(case, plan, step)


class Refined(Shared):
    """Calls without gradients, then with."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for _ in range(3):
                x = self.block(x)
        return super().forward(x)


def test_calls_without_gradients_are_no_calls() -> None:
    torch.manual_seed(0)
    case = Case(Refined(), (torch.randn(4, 64, 32),), loss=lambda out: out.square().sum())
    plan = planned(case)
    assert len(by_call(plan)) == 6
    assert_holds(case, plan)


class Siamese(nn.Module):
    """Two blocks, both called for each of two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(32) for _ in range(2))

    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        for block in self.blocks:
            one = block(one)
        for block in self.blocks:
            other = block(other)
        return (one - other).square().sum()


def test_the_towers_of_a_siamese_model_are_treated_one_by_one() -> None:
    torch.manual_seed(0)
    case = Case(Siamese(), (torch.randn(4, 64, 32), torch.randn(4, 64, 32)), loss=lambda out: out)
    plan = planned(case, "80%")
    assert any(item.treatment.calls for item in plan.decisions)
    assert_holds(case, plan)
    assert reactivate.verify(case.model, case.args, policy=plan).is_same


def test_an_adaptive_plan_counts() -> None:
    case = shared()
    adaptive = reactivate.plan(case.model, case.args, budget="60%", loss=case.loss, shapes="adaptive")
    plain = [parameter.grad for parameter in gradients(case.model, case, 64)]
    with reactivate.apply(case.model, adaptive):
        ours = [parameter.grad for parameter in gradients(case.model, case, 64)]
        assert len(gradients(case.model, case, 48)) == len(ours)
    assert all(torch.equal(one, other) for one, other in zip(plain, ours))
    assert any(item.calls for found in adaptive.classes for item in found.treatments.values())


def gradients(model: nn.Module, case: Case, length: int) -> list[nn.Parameter]:
    for parameter in model.parameters():
        parameter.grad = None
    torch.manual_seed(3)
    case.loss(model(torch.randn(4, length, 32))).backward()
    return list(model.parameters())


def test_a_storage_takes_what_some_calls_keep(tmp_path: Path) -> None:
    case = shared()
    plan = planned(case, "40%", storages=[Disk(tmp_path, least_bytes=0)])
    least = plan.at("25%") if plan.frontier[0].peak_bytes <= plan.budget_bytes else plan
    assert len(by_call(least)) in (0, 6)
    verdict = reactivate.verify(case.model, case.args, policy=least)
    assert verdict.is_same and verdict.regions > 0


def test_many_calls_are_planned_quickly() -> None:
    case = shared(calls=40)
    plan = planned(case, "50%")
    assert len(by_call(plan)) == 40
    assert_holds(case, plan)

"""Plans of layers that a forward runs several times: one candidate for all calls."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from memory import allocated_by
from plan_models import Block, Case
from torch import Tensor, nn

import reactivate
from reactivate.planner.candidates import KEEP, Candidate
from reactivate.planner.plan import Plan
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


class Refined(Shared):
    """Calls without gradients, then with."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for _ in range(3):
                x = self.block(x)
        return super().forward(x)


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


class Mixed(nn.Module):
    """Equal blocks, one of which is called three times."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(32) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            for _ in range(3 if number == 2 else 1):
                x = block(x)
        return x


def case_of(kind: type[nn.Module], **options: Any) -> Case:
    torch.manual_seed(0)
    count = 2 if kind is Siamese else 1
    batch = tuple(torch.randn(4, 64, 32) for _ in range(count))
    return Case(kind(**options), batch, loss=lambda out: out.square().sum())


def planned(case: Case, budget: str = "60%", **options: Any) -> Plan:
    return reactivate.plan(case.model, case.args, case.kwargs, budget=budget, loss=case.loss, **options)


def candidate_of(plan: Plan) -> Candidate:
    """Return the candidate of the shared layer."""
    (decision,) = [item for item in plan.decisions if item.path == "block"]
    return decision.candidate


def assert_holds(case: Case, plan: Plan, step: Any = None) -> None:
    for parameter in case.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with reactivate.apply(case.model, plan):
        (step or case.step)()
        peak = allocated_by(step or case.step).peak_bytes
    case.model.zero_grad()
    own = plan.plain.peak_bytes - plan.fixed.total
    assert plan.fixed.total + peak <= plan.budget_bytes
    assert abs(plan.predicted.peak_bytes - plan.fixed.total - peak) <= 0.005 * own


@pytest.mark.parametrize("kind", [Shared, Refined, Siamese, Mixed])
@pytest.mark.parametrize("budget", ["85%", "60%"])
def test_plans_hold_their_budgets(kind: type[nn.Module], budget: str) -> None:
    case = case_of(kind)
    plan = planned(case, budget)
    assert_holds(case, plan)
    verdict = reactivate.verify(case.model, case.args, policy=plan)
    assert verdict and verdict.regions > 0 and verdict.kept_bytes < verdict.plain_bytes


def test_all_calls_are_treated_alike() -> None:
    case = case_of(Shared)
    assert candidate_of(planned(case, "100%")) == KEEP
    least = planned(case, "35%")
    assert candidate_of(least).recompute
    full = reactivate.verify(case.model, case.args, policy=least)
    assert full.regions >= 6


def test_accumulation() -> None:
    case = case_of(Shared)
    batches = [torch.randn(4, 64, 32) for _ in range(2)]

    def step() -> None:
        for batch in batches:
            case.loss(case.model(batch)).backward()

    assert_holds(case, reactivate.plan(case.model, budget="60%", step=step), step)


def test_calls_outside_of_the_model_count() -> None:
    case = case_of(Shared)

    def step() -> None:
        x = case.model.block(case.args[0])
        case.loss(case.model(x)).backward()

    plan = reactivate.plan(case.model, budget="40%", step=step)
    assert candidate_of(plan) != KEEP
    assert_holds(case, plan, step)


def test_a_storage_takes_what_is_kept(tmp_path: Path) -> None:
    case = case_of(Shared)
    plan = planned(case, "40%", storage=[Disk(tmp_path, least_bytes=0)])
    verdict = reactivate.verify(case.model, case.args, policy=plan)
    assert verdict and verdict.regions > 0


def test_many_calls_are_planned_quickly() -> None:
    case = case_of(Shared, calls=40)
    plan = planned(case, "50%")
    assert candidate_of(plan) != KEEP
    assert_holds(case, plan)

"""Budgets of a plan: what is part of them, the least that holds, and the largest batch or length that fits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from memory import allocated_by
from oracle import random_states
from plan_checks import assert_all_bitwise, peak_of, planned
from plan_models import GPT, Positions, gpt
from several import each
from torch import Tensor, nn
from torch.nn import functional as F

import reactivate
from reactivate._torch.modes import FakeTensor
from reactivate.errors import PlanInfeasible, UsageError


def test_the_least_budget_is_named_and_holds_and_one_byte_less_is_refused() -> None:
    case = gpt(layers=2)
    with pytest.raises(PlanInfeasible, match="the least that does takes") as caught:
        planned(case, 1000)
    least = caught.value.least_bytes
    assert caught.value.budget_bytes == 1000
    plan = planned(case, least)
    assert plan.fixed.total + peak_of(case, plan) <= least
    with pytest.raises(PlanInfeasible) as again:
        planned(case, least - 1)
    assert again.value.least_bytes == least


def test_a_budget_is_all_included() -> None:
    case = gpt(layers=3)
    optimizer = torch.optim.Adam(case.model.parameters())
    plan = planned(case, "60%", optimizer=optimizer)
    parameters = sum(item.nbytes for item in case.model.parameters())
    assert plan.fixed.parameters == plan.fixed.gradients == parameters
    steps = 4 * len(list(case.model.parameters()))  # a number of steps for each parameter
    assert plan.fixed.optimizer == 2 * parameters + steps
    assert plan.fixed.inputs == case.args[0].nbytes
    assert not optimizer.state  # untouched
    for parameter in case.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    found = allocated_by(optimizer.step).peak_bytes
    assert abs(plan.optimizer_bytes - plan.fixed.total - found) <= 0.01 * found
    tight = max(plan.predicted.peak_bytes, plan.optimizer_bytes)
    assert plan.at(tight).peak_bytes <= tight
    with pytest.raises(PlanInfeasible) as caught:
        plan.at(plan.optimizer_bytes - 1)
    assert caught.value.least_bytes >= plan.optimizer_bytes


def test_a_share_is_of_the_activations() -> None:
    plan = planned(gpt(layers=3), "50%")
    own = plan.plain.peak_bytes - plan.fixed.total
    assert plan.budget_bytes == plan.fixed.total + own // 2


def test_a_cpu_has_no_default_budget() -> None:
    case, calls = gpt(layers=2), []
    case.model.register_forward_pre_hook(lambda *call: calls.append(call))
    with pytest.raises(UsageError, match="needs a budget on a CPU"):
        reactivate.plan(case.model, case.args)
    assert not calls, "it is refused before anything runs"


def test_less_memory_is_more_time_on_the_frontier() -> None:
    plan = planned(gpt(layers=4), "70%")
    points = plan.frontier
    assert len(points) > 3
    assert [point.peak_bytes for point in points] == sorted({point.peak_bytes for point in points})
    seconds = [point.seconds for point in points]
    assert seconds == sorted(seconds, reverse=True)
    assert {"none()", "full()", "recompute_every(2)"} <= {point.label for point in plan.policies}
    none = next(point for point in plan.policies if point.label == "none()")
    assert none.peak_bytes == plan.plain.peak_bytes
    for policy in plan.policies:  # none is both smaller and faster than what the solver found
        assert not any(policy.peak_bytes < point.peak_bytes and policy.seconds < point.seconds for point in points)


@pytest.mark.slow
def test_the_largest_batch_is_found() -> None:
    class Labelled(GPT):
        def forward(self, tokens: Tensor) -> Tensor:
            return F.cross_entropy(super().forward(tokens).flatten(0, 1), tokens.flatten())

    model = Labelled(layers=2)
    tokens = torch.randint(64, (2, 32))
    budget = reactivate.plan(model, tokens, budget="100%").budget_bytes * 2
    plan = reactivate.plan(model, tokens, budget=budget, maximize="batch")
    assert plan.largest is not None and plan.largest > 4
    assert plan.made_for.inputs[0][1] == (plan.largest, 32)
    assert plan.predicted.peak_bytes <= budget
    with pytest.raises(PlanInfeasible):
        reactivate.plan(model, torch.randint(64, (plan.largest + 1, 32)), budget=budget)
    longer = reactivate.plan(model, tokens, budget=budget, maximize={"length": 1})
    assert longer.largest is not None and longer.made_for.inputs[0][1] == (2, longer.largest)


@each("maximize", ["length", {"a": 0, "b": 1}, 3, {"length": True}])
def test_what_cannot_be_maximized_is_refused(maximize: Any) -> None:
    with pytest.raises(UsageError, match="takes 'batch'"):
        reactivate.plan(GPT(layers=2), torch.zeros(2, 8, dtype=torch.long), budget="1GiB", maximize=maximize)


def test_a_loss_with_targets_of_its_own_cannot_be_maximized() -> None:
    case = gpt(layers=2)
    with pytest.raises(UsageError, match="does not run with another size than"):
        planned(case, "1GiB", maximize="batch")


@pytest.mark.parametrize("length", [*(pytest.param(length, marks=pytest.mark.slow) for length in (8, 15)), 20])
def test_the_end_of_a_table_of_positions_ends_the_search(length: int) -> None:
    x = torch.randn(2, length, 32)
    with pytest.warns(UserWarning, match="20 is the largest length with which the model runs; with .* it raises"):
        plan = reactivate.plan(Positions(), x, budget="1GiB", maximize={"length": 1})
    assert plan.largest == 20


class Drawing(GPT):
    """Runs some of its blocks: those that it draws, of those that it has."""

    first = 0

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks[self.first :]:
            x = block(x) if torch.rand(()) < 0.7 else x
        return self.head(self.norm(x))


def test_a_plan_for_another_budget_is_for_the_step_that_was_planned() -> None:
    """Whatever is drawn by then, and if the model itself runs other blocks by now."""
    torch.manual_seed(3)
    model = Drawing(layers=6)
    plan = reactivate.plan(model, torch.randint(64, (4, 64)), budget="90%")
    found = []
    for seed in range(3):
        torch.manual_seed(seed)
        before = random_states()
        tighter = plan.at(int(0.7 * plan.plain.peak_bytes) + seed)  # no plan that was tried before
        found.append((tighter.predicted.peak_bytes, tighter.decisions))
        assert_all_bitwise(before, random_states())
    assert found[0] == found[1] == found[2]
    assert abs(plan.measure().error) <= 0.0005
    model.first = 4
    assert plan.at("65%").decisions


class Short(GPT):
    """Has too little memory for a real step, from one moment on."""

    is_short = False

    def forward(self, tokens: Tensor) -> Tensor:
        if self.is_short and not isinstance(self.embed.weight, FakeTensor):
            raise torch.OutOfMemoryError("Out of memory. Tried to allocate 64.00 KiB.")
        return super().forward(tokens)


def test_a_plan_for_another_budget_needs_no_more_memory_than_there_is() -> None:
    model = Short(layers=3)
    plan = reactivate.plan(model, torch.randint(64, (4, 64)), budget="90%")
    assert plan.proof.method == "real"
    model.is_short = True
    tighter = plan.at("55%")
    assert tighter.proof.method == "simulated" and tighter.predicted.peak_bytes <= tighter.budget_bytes


def test_a_bare_number_may_have_been_meant_as_a_share_or_with_a_unit() -> None:
    model, x = nn.Linear(4, 4), torch.ones(1, 4)
    with pytest.raises(PlanInfeasible, match='A number alone is one of bytes: "40%" is a share, "40GiB" has a unit'):
        reactivate.plan(model, x, budget=40)
    with pytest.raises(PlanInfeasible) as caught:
        reactivate.plan(model, x, budget="40%")
    assert "A number alone" not in str(caught.value)

"""Containers around units as one unit: what they come to, when they are offered, and plans that choose them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from plan_models import Block, Case, Residual, peak_with
from torch import Tensor, nn

import reactivate
from reactivate.errors import PlanInfeasible
from reactivate.planner.containers import containers_in
from reactivate.planner.plan import Plan
from reactivate.planner.planner import Planner
from reactivate.planner.step import TrainingStep
from reactivate.planner.target import find_target


def stage(given: int, made: int, count: int = 3) -> nn.Sequential:
    return nn.Sequential(*(Residual(given if number == 0 else made, made) for number in range(count)))


class ResNet(nn.Module):
    """Stages that are called, with something between them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, 1, 1), nn.BatchNorm2d(16), nn.ReLU())
        self.layer1, self.layer2, self.layer3 = stage(16, 16), stage(16, 32), stage(32, 32)
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer1(self.stem(x))
        x = self.layer3(self.layer2(x).tanh())
        return self.head(x.mean((2, 3)))


class Tail(nn.Module):
    """A container with ops of its own before, between and behind its members."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = (x * 2).sin()
        for block in self.blocks:
            x = block(x.exp().clamp(max=2)).cos()
        return (x.sigmoid() * 3).tanh()


class OpsBetween(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.block = Tail(), Tail(), Block(16)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.block(self.one(x)))


class Unpacked(ResNet):
    """Somebody calls the members of a stage, not the stage."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer1(self.stem(x))
        for block in self.layer2:
            x = block(x)
        return self.head(self.layer3(x).mean((2, 3)))


class Twice(nn.Module):
    """A stage that is called twice, and one in which a block is that another one has."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Sequential(Block(16), Block(16)), nn.Sequential(Block(16), Block(16))
        self.three = nn.Sequential(Block(16), self.two[0])

    def forward(self, x: Tensor) -> Tensor:
        return self.three(self.two(self.one(self.one(x))))


def images(make: Callable[[], nn.Module] = ResNet) -> Case:
    torch.manual_seed(0)
    return Case(make(), (torch.randn(4, 3, 32, 32),), loss=lambda out: out.square().sum())


def sequences(make: Callable[[], nn.Module] = OpsBetween) -> Case:
    torch.manual_seed(0)
    return Case(make(), (torch.randn(4, 64, 16),), loss=lambda out: out.square().sum())


def planner_of(case: Case, **options: Any) -> Planner:
    """Return what plans a step on the device of a table: its times depend on nothing that runs here."""
    step = TrainingStep(case.model, case.args, case.kwargs, case.loss)
    place = find_target(case.model, case.args, case.kwargs, "H100-SXM")
    return Planner(step, place, None, lambda text: None, **options).prepare()


def planned(case: Case, budget: str | int, **options: Any) -> Plan:
    return reactivate.plan(case.model, case.args, case.kwargs, budget=budget, loss=case.loss, **options)


def found_in(case: Case) -> dict[str, tuple[int, int]]:
    return {item.path: (item.start, item.stop) for item in containers_in(case.model, planner_of(case).plain_summary)}


def test_containers_are_modules_around_several_units_in_a_row() -> None:
    stages = {"layer1": (1, 4), "layer2": (4, 7), "layer3": (7, 10)}
    assert found_in(images()) == stages | {f"{path}[0:2]": (start, start + 2) for path, (start, _) in stages.items()}
    assert found_in(sequences()) == {"one": (0, 3), "two": (4, 7)}
    assert found_in(sequences(Tail)) == {}, "a container of all units saves nothing"


def test_a_container_is_called_once() -> None:
    assert found_in(sequences(Twice)) == {}


def test_members_that_are_called_one_by_one_are_no_container() -> None:
    spans = {entry.span for span in planner_of(images(Unpacked)).table.spans for entry in span.options}
    assert spans == {"layer1", "layer1[0:2]", "layer3", "layer3[0:2]"}


@pytest.mark.parametrize("make", [images, sequences])
def test_spans_come_to_what_their_step_does(make: Callable[[], Case]) -> None:
    """To the byte, though several containers were tried in one step; and the seconds are those of its ops."""
    planner = planner_of(make())
    table = planner.table
    keep = planner.search.chain.menus
    assert len(table.spans) >= 4
    for span in table.spans:
        stop = span.start + len(span.options)
        entries = [*(menu[0] for menu in keep[: span.start]), *span.options, *(menu[0] for menu in keep[stop:])]
        promised = planner.search.chain.solution_of(entries)
        (path,) = {entry.span for entry in span.options}
        candidate = next(item for item in planner.all_menus[path] if item.name == span.options[0].name)
        trace, reading = planner.attempt({path: candidate})
        assert promised.peak_bytes >= trace.peak_bytes, "never less than it is"
        assert promised.peak_bytes - trace.peak_bytes <= 0.01 * planner.plain.peak_bytes
        engine = sum(call.seconds for call in reading.calls) + sum(reading.between_seconds) - trace.seconds
        assert promised.seconds == pytest.approx(trace.seconds + engine - planner.plain.seconds, rel=1e-6)


@pytest.mark.parametrize("make", [images, sequences])
def test_plans_with_containers_keep_their_budgets(make: Callable[[], Case]) -> None:
    case = make()
    first = planned(case, "100%")
    containers = {"layer1", "layer2", "layer3", "one", "two"}
    chosen: set[str] = set()
    for budget in ("70%", "50%", "40%", "30%", "20%"):
        try:
            plan = first.at(budget)
        except PlanInfeasible as error:
            plan = first.at(error.least_bytes)
        peak = peak_with(case, plan)
        assert plan.fixed.total + peak <= plan.budget_bytes
        own = first.plain.peak_bytes - first.fixed.total
        assert abs(plan.predicted.peak_bytes - plan.fixed.total - peak) <= 0.01 * own
        verdict = reactivate.verify(case.model, case.args, policy=plan)
        assert verdict.is_same and verdict.regions > 0
        paths = {decision.path for decision in plan.decisions}
        assert not any(path.startswith(f"{above}.") for path in paths for above in paths if above)
        chosen |= paths & containers
        assert Plan.from_json(plan.to_json()) == plan
    assert chosen, "some plan treats a container as one"


def test_a_container_makes_a_smaller_budget_feasible() -> None:
    planner = planner_of(images())
    with_containers = planner.smallest_bytes()
    planner.table.spans.clear()
    assert with_containers < planner.smallest_bytes()

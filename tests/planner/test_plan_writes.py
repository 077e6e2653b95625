"""Plans of models with blocks that write to their own arguments: these are kept, and others are recomputed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import Watched, assert_bitwise
from torch import Tensor, nn
from torch.nn import functional as F

import reactivate
from reactivate._passes.observing import observed_by
from reactivate.errors import MutationError, PlanInfeasible
from reactivate.planner import simulator
from reactivate.planner.budget import parse
from reactivate.planner.candidates import FULL
from reactivate.planner.plan import Plan
from reactivate.planner.planner import Planner
from reactivate.planner.step import TrainingStep
from reactivate.planner.target import find_target


class Block(nn.Module):
    """A block that leaves its argument alone."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(16, 64), nn.BatchNorm1d(64), nn.Linear(64, 16)
        self.factor, self.relu = 0.5, nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.norm(self.up(x)).relu()).add(1.0)


class Relu(Block):
    """As a residual block with its activation in front."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(x)
        return x + super().forward(x)


class Add(Block):
    def forward(self, x: Tensor) -> Tensor:
        x.add_(1.0)
        return super().forward(x)


class ByAttribute(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mul_(self.factor))


class ToView(Block):
    def forward(self, x: Tensor) -> Tensor:
        x[:, :4].add_(1.0)
        return super().forward(x)


class InTraining(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.leaky_relu_(x) if self.training else x)


class Maybe(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if self.factor == 1 else x.mul_(self.factor))


class Pair(nn.Module):
    """A block of two parts, of which the second may write to what the first has made."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.one, self.two = Block(), Maybe()
        self.two.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.one(x))


class ToKeyword(Block):
    def forward(self, x: Tensor, *, skip: Tensor | None = None) -> Tensor:
        return super().forward(x if skip is None else x * skip.add_(1.0))


class Skips(nn.Module):
    """Blocks with a keyword argument that is made for each of them."""

    def __init__(self, write: type[Block]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(write() if number % 2 else Block() for number in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, skip=x * 2) if isinstance(block, ToKeyword) else block(x)
        return x


class Branches(nn.Module):
    """Of two blocks with one argument the second writes to it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.ModuleList(nn.Sequential(nn.ReLU(), Block()) for _ in range(3))
        self.second, self.last = nn.ModuleList(Add() for _ in range(3)), nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for first, second, last in zip(self.first, self.second, self.last):
            x = last(x) + 1
            x = first(x) + second(x)
        return x


def in_turn(write: type[Block]) -> nn.Module:
    return Skips(write) if write is ToKeyword else nn.Sequential(*((Block, write)[n % 2]() for n in range(6)))


WRITES = [Relu, Add, ByAttribute, ToView, InTraining, ToKeyword]


@pytest.fixture(params=["for real", "simulated"], autouse=True)
def _ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "simulated":
        monkeypatch.setattr(simulator, "is_alone", lambda: False)


def made(make: Callable[[], nn.Module]) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return make(), torch.randn(256, 16)


def least_bytes(model: nn.Module, x: Tensor) -> int:
    with pytest.raises(PlanInfeasible) as least:
        reactivate.plan(model, x, budget=1)
    return least.value.least_bytes


def assert_kept(model: nn.Module, x: Tensor, plan: Plan) -> None:
    """The plan holds its budget, some regions run, and a step gives what a plain one does."""
    measured = plan.measure()
    assert measured.holds and measured.measured_bytes <= plan.budget_bytes
    plain, watched = copy.deepcopy(model), Watched()
    with reactivate.apply(model, plan), observed_by(watched):
        (found := model(x.clone())).square().sum().backward()
    (expected := plain(x.clone())).square().sum().backward()
    assert watched.recomputations == watched.regions > 0
    assert_bitwise(found, expected, "the output")
    for (name, one), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert_bitwise(one.grad, other.grad, name)
    for (name, one), other in zip(model.named_buffers(), plain.buffers(), strict=True):
        assert_bitwise(one, other, name)


@pytest.mark.parametrize("write", WRITES)
def test_blocks_that_write_to_their_arguments_are_kept(write: type[Block]) -> None:
    model, x = made(lambda: in_turn(write))
    plan = reactivate.plan(model, x, budget="80%")
    paths = {path for path, module in model.named_modules() if type(module) is write}
    assert len(paths) == 3 and paths.isdisjoint(plan.assignment.regions)
    assert_kept(model, x, plan)


def test_a_block_whose_argument_another_one_overwrites_is_kept() -> None:
    model, x = made(Branches)
    plan = reactivate.plan(model, x, budget="80%")
    paths = {path for path, _ in model.named_modules() if path.rpartition(".")[0] in ("first", "second")}
    assert len(paths) == 6 and paths.isdisjoint(plan.assignment.regions)
    assert_kept(model, x, plan)


def test_a_span_in_which_the_written_tensor_is_made_is_recomputed() -> None:
    model, x = made(lambda: in_turn(Add))
    plan = reactivate.plan(model, x, budget=least_bytes(model, x))
    assert any("[" in path for path in plan.assignment.regions)
    assert_kept(model, x, plan)


def test_the_error_names_the_blocks_that_are_kept() -> None:
    model, x = made(lambda: nn.Sequential(nn.Linear(16, 16), *(Relu() for _ in range(4))))
    with pytest.raises(PlanInfeasible, match=r"4 blocks, from 1 to 4, are kept: .* written to in place"):
        reactivate.plan(model, x, budget="10%")


def test_what_an_equal_block_is_refused_is_no_candidate_from_then_on() -> None:
    """Only the last of the blocks that share measurements writes, and only a plan tries that."""
    model, x = made(lambda: nn.Sequential(*(Pair(0.5 if number == 7 else 1.0) for number in range(8))))
    step = TrainingStep(model, (x,))
    planner = Planner(step, find_target(model, (x,), {}, None), None, lambda text: None).prepare()
    candidate = next(item for item in planner.menus["7"] if item.recompute == ("two",))
    assert planner.table.change("7", candidate) is not None
    trace, _ = planner.attempt({"7": candidate})
    assert not trace.fits(trace.needed_bytes) and "7.two" in trace.failures[0]
    assert planner.table.change("7", candidate) is None is not planner.table.change("6", candidate)
    plan = planner.plan(parse("40%"))
    assert "7.two" not in plan.assignment.regions
    assert_kept(model, x, plan)


# -- blocks that write in later steps than the first ------------------------------------------------------------------


class InSome(Block):
    """A block that writes to its argument in every second call, or third."""

    def __init__(self, every: int) -> None:
        super().__init__()
        self.every, self.calls = every, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x.mul_(2.0) if self.calls % self.every == 0 else x)


def later(every: int) -> tuple[nn.Module, Tensor]:
    return made(lambda: nn.Sequential(*(InSome(every) if number % 2 else Block() for number in range(6))))


def assert_trains(model: nn.Module, x: Tensor, plan: Plan, steps: int = 6) -> None:
    """So many steps in a row give what plain ones do."""
    plain, watched = copy.deepcopy(model), Watched()
    with reactivate.apply(model, plan), observed_by(watched):
        for _ in range(steps):
            model(x.clone()).square().sum().backward()
    for _ in range(steps):
        plain(x.clone()).square().sum().backward()
    assert watched.recomputations == watched.regions > 0
    for (name, one), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert_bitwise(one.grad, other.grad, name)


def test_blocks_that_write_in_every_second_step_are_kept() -> None:
    model, x = later(2)
    plan = reactivate.plan(model, x, budget=least_bytes(model, x))
    assert {"1", "3", "5"}.isdisjoint(plan.assignment.regions) and plan.measure().holds
    assert_trains(model, x, plan)


def test_measure_names_the_blocks_that_a_later_step_writes_to_and_the_next_plan_keeps_them() -> None:
    model, x = later(3)
    plan = reactivate.plan(model, x, budget=least_bytes(model, x))
    assert not {"1", "3", "5"}.isdisjoint(plan.assignment.regions)
    with pytest.raises(MutationError, match=rf"recomputes `.*3`.* Take plan.at\('{plan.budget}'\)"):
        plan.measure()
    following = plan.at("90%")
    assert {"1", "3", "5"}.isdisjoint(following.assignment.regions)
    assert following.measure().holds
    assert_trains(model, x, following)
    with pytest.raises(PlanInfeasible, match="are kept: what a block there is given is written to in place"):
        plan.at(plan.budget)


def test_a_span_that_a_later_step_writes_to_is_none_of_the_next_plan() -> None:
    model, x = made(lambda: nn.Sequential(Block(), Block(), InSome(3), Block(), InSome(3), Block()))
    plan = reactivate.plan(model, x, budget="60%")
    refused = {path for path in plan.assignment.regions if path[0] in "24" or path.startswith(("[2:", "[4:"))}
    assert any("[" in path for path in refused)
    with pytest.raises(MutationError, match=r"recomputes .*`\[[24]:"):
        plan.measure()
    following = plan.at("80%")
    assert refused.isdisjoint(following.assignment.regions) and following.measure().holds


# -- candidates that the first of several equal blocks cannot try ------------------------------------------------------


@pytest.mark.parametrize("writer", [0, 1, 7])
def test_what_one_block_is_refused_an_equal_one_tries(writer: int) -> None:
    model, x = made(lambda: nn.Sequential(*(Pair(0.5 if number == writer else 1.0) for number in range(8))))
    planner = Planner(TrainingStep(model, (x,)), find_target(model, (x,), {}, None), None, lambda text: None).prepare()
    for path, menu in planner.menus.items():
        unknown = [item for item in menu if planner.table.change(path, item) is None]
        assert all(not planner.table.allows(path, item) for item in unknown), path
        assert path == str(writer) or not unknown


def test_the_calls_of_a_block_that_can_be_recomputed_stand_for_those_of_equal_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, x = made(lambda: nn.Sequential(Block(), *(Maybe() for _ in range(6))))
    for block in model[2:]:
        block.factor = 1.0
    found: list[set[str]] = []
    record = simulator.Simulator.record

    def recorded(self: simulator.Simulator, *args: Any, **kwargs: Any) -> Any:
        calls = record(self, *args, **kwargs)
        found.append(set(calls))
        return calls

    monkeypatch.setattr(simulator.Simulator, "record", recorded)
    planner = Planner(TrainingStep(model, (x,)), find_target(model, (x,), {}, None), None, lambda text: None).prepare()
    assert planner.table.change("1", FULL) is None and found == [{"0", "2"}]


class Other(Block):
    """A block that calls what others do not."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x if self.factor == 0.5 else x + F.scaled_dot_product_attention(x[None], x[None], x[None])[0]


def test_what_only_some_of_equal_blocks_call_is_tried_there() -> None:
    model, x = made(lambda: nn.Sequential(*(Other() for _ in range(6))))
    model[5].factor = 1.0
    planner = Planner(TrainingStep(model, (x,)), find_target(model, (x,), {}, None), None, lambda text: None).prepare()
    assert {item.name for item in planner.menus["0"]} < {item.name for item in planner.menus["5"]}
    assert all(planner.table.change("5", item) is not None for item in planner.menus["5"])


@pytest.mark.parametrize("runs", [0, 1])
def test_a_step_that_calls_other_blocks_when_it_runs_again_is_said(runs: int, tmp_path: Path) -> None:
    """The number of its runs is in a file, which planning does not set back."""
    model, x = made(lambda: nn.Sequential(*(Block() for _ in range(4))))
    log = tmp_path / "log"
    log.write_text("." * runs)

    def step() -> None:
        with log.open("a") as file:
            file.write(".")
        model[log.stat().st_size % 2 :](x).square().sum().backward()

    with pytest.warns(UserWarning, match="called other blocks when it ran again"):
        reactivate.plan(model, budget="100%", step=step)

"""Plans for steps that need values: what they do depends on what they compute."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from memory import allocated_by
from oracle import assert_bitwise, random_states
from plan_models import DIM, Block, Mixture
from torch import Tensor, nn
from torch.nn import functional as F

import reactivate
from reactivate.errors import PlanInfeasible, UsageError
from reactivate.planner import watches
from reactivate.planner.budget import MARGIN, parse_margin
from reactivate.planner.plan import Plan
from reactivate.planner.watches import PeakWatch
from reactivate.storage import Disk


class Deciding(nn.Module):
    """Takes a turn that depends on the sign of a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(DIM) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) if x.sum() > 0 else block(-x)
        return x


class Aligned(nn.Module):
    """Its loss has no simulation in torch."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(DIM) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        targets = torch.arange(1, 5).expand(len(x), 4)
        lengths = torch.full((len(x),), 4)
        return F.ctc_loss(x.transpose(0, 1).log_softmax(-1), targets, torch.full_like(lengths, x.shape[1]), lengths)


MODELS = {"experts": Mixture, "a turn": Deciding, "ctc": Aligned}


def made(name: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return MODELS[name](), torch.randn(8, 64, DIM)


def peak_of(model: nn.Module, x: Tensor, plan: Plan | None) -> int:
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    handle = None if plan is None else reactivate.apply(model, plan)

    def step() -> None:
        out = model(x)  # which is alive during the backward
        out.sum().backward()

    for _ in range(3):  # the first recomputations are compared with their forwards
        step()
    found = allocated_by(step).peak_bytes
    if handle is not None:
        handle.remove()
    model.zero_grad()
    return found


@pytest.mark.parametrize("name", MODELS)
def test_budgets_hold_and_the_least_is_named(name: str) -> None:
    model, x = made(name)
    first = reactivate.plan(model, x, budget="100%")
    plain = peak_of(model, x, None)
    assert first.proof.method == "real"
    assert abs(first.plain.peak_bytes - first.fixed.total - plain) <= 0.01 * plain
    planned = 0
    for budget in ("75%", "45%"):
        try:
            plan = first.at(budget)
        except PlanInfeasible as error:
            plan = first.at(error.least_bytes)
            with pytest.raises(PlanInfeasible):
                first.at(error.least_bytes - 1)
        peak = peak_of(model, x, plan)
        assert plan.fixed.total + peak + plan.proof.margin_bytes <= plan.budget_bytes
        assert abs(plan.predicted.peak_bytes - plan.fixed.total - peak) <= 0.01 * plain
        assert peak < plain
        verdict = reactivate.verify(model, x, policy=plan)
        assert verdict.is_same and verdict.regions > 0, verdict
        planned += 1
    assert planned == 2


def test_a_margin_is_left_where_sizes_depend_on_the_data() -> None:
    model, x = made("experts")
    plan = reactivate.plan(model, x, budget="60%")
    own = plan.proof.peak_bytes - plan.fixed.total
    assert 0 < plan.proof.margin_bytes < parse_margin(MARGIN) * own  # of what the experts make, and not of the rest
    assert "are left free for other batches" in str(plan)
    other = Plan.from_json(plan.to_json())
    assert other.proof == plan.proof

    double = reactivate.plan(model, x, budget="60%", margin="10%", head="keep")
    assert double.proof.margin_bytes > plan.proof.margin_bytes
    none = reactivate.plan(model, x, budget="60%", margin=0)
    assert none.proof.margin_bytes == 0 and "left free for other batches" not in str(none)
    with pytest.raises(UsageError, match=r"plan\(margin=2\): it takes a share"):
        reactivate.plan(model, x, budget="60%", margin=2)

    aligned = reactivate.plan(*made("ctc"), budget="60%")
    assert "are left free for other batches" in str(aligned)  # the lengths of its targets are numbers, too

    block, batch = made("a turn")
    assert not reactivate.plan(block.blocks[0], batch, budget="90%").proof.margin_bytes


def test_the_margin_is_what_the_user_says() -> None:
    model, x = made("experts")
    none, plan, more = (reactivate.plan(model, x, budget="60%", margin=margin) for margin in (0, None, "20%"))
    assert none.proof.margin_bytes == 0 < plan.proof.margin_bytes < more.proof.margin_bytes
    for margin in ("much", 0.1, 5, True):
        with pytest.raises(UsageError, match="it takes a share of the memory whose size depends on data"):
            reactivate.plan(model, x, budget="60%", margin=margin)  # type: ignore[arg-type]


def test_blocks_with_experts_have_as_many_candidates_and_no_larger_least_plan_than_torch() -> None:
    model, x = made("experts")
    with pytest.raises(PlanInfeasible) as found:
        reactivate.plan(model, x, budget=1)
    plan = reactivate.plan(model, x, budget="60%")
    planner: Any = plan.runner.plan.__self__  # type: ignore[union-attr]
    assert sum("calls" in item.name for item in planner.menus["blocks.0"]) >= 3

    def checkpointed(x: Tensor) -> Tensor:
        for block in model.blocks:
            x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
        return x

    def step() -> None:
        out = checkpointed(x)
        out.sum().backward()

    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    step()
    assert found.value.least_bytes - plan.fixed.total <= allocated_by(step).peak_bytes


def test_no_margin_is_left_where_arguments_alone_decide() -> None:
    class Masked(Deciding):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return super().forward(x) if mask.any() else self.blocks[0](x[:, mask.sum().item() :])

    torch.manual_seed(0)
    plan = reactivate.plan(Masked(), (torch.randn(4, 64, DIM), torch.zeros(3, dtype=torch.bool)), budget="100%")
    assert not plan.proof.margin_bytes


def test_the_model_is_as_it_was(capfd: pytest.CaptureFixture[str]) -> None:
    model, x = made("experts")
    model.blocks[0].experts.register_buffer("loads", torch.zeros(4))
    weight = model.blocks[0].experts.router.weight
    weight.grad = torch.randn_like(weight)
    state = {name: item.clone() for name, item in model.state_dict().items()}
    gradient, value, states = weight.grad, weight.grad.clone(), random_states()

    def count(module: Any, args: Any, out: Any) -> None:
        module.loads += 1

    model.blocks[0].experts.register_forward_hook(count)
    reactivate.plan(model, x, budget="60%")
    for name, value_then in (states | state).items():
        assert_bitwise(value_then, (random_states() | model.state_dict())[name], name)
    assert weight.grad is gradient and torch.equal(gradient, value)
    assert not [module for module in model.modules() if module._forward_pre_hooks]
    assert "failed while attempting" not in capfd.readouterr().err  # torch's log of what fake tensors cannot do


class Bytes(Deciding):
    """Reads memory behind torch's back."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if x.detach().untyped_storage()[0] else -x)


@pytest.mark.parametrize("kind", [Deciding, Bytes])
def test_storages_are_left_out(tmp_path: Path, kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    with pytest.warns(UserWarning, match="The plan is made without storages"):
        plan = reactivate.plan(kind(), torch.randn(4, 64, DIM), budget="60%", storage=[Disk(tmp_path)])
    assert plan.proof.method == ("real" if kind is Bytes else "simulated") and not plan.storages


def test_the_largest_batch() -> None:
    model, x = made("a turn")
    model.blocks = model.blocks[:2]
    budget = reactivate.plan(model, x[:3], budget="90%").budget_bytes
    largest = reactivate.plan(model, x[:3], budget=budget, maximize="batch").largest
    assert largest is not None and 3 <= largest < 8
    assert reactivate.plan(model, x[:largest], budget=budget)
    with pytest.raises(PlanInfeasible):
        reactivate.plan(model, x[: largest + 1], budget=budget)


def test_a_model_without_values_is_refused() -> None:
    model, x = made("experts")
    model, x = model.to("meta"), x.to("meta")
    with pytest.raises(UsageError, match="cannot be simulated.*needs values"):
        reactivate.plan(model, x, budget="60%", device="H100-SXM")


def test_an_error_of_the_model_is_the_models() -> None:
    model, x = made("experts")
    model.blocks[3].experts.experts[0][0] = nn.Linear(DIM + 1, 4 * DIM)
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
        reactivate.plan(model, x, budget="60%")


def test_training_that_takes_more_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    peaks = iter([100, 90, 100, 120])
    monkeypatch.setattr(watches.PeakWatch, "_peak_bytes", lambda self: next(peaks))
    model = nn.Linear(2, 2)
    model.register_forward_pre_hook(PeakWatch(110, torch.device("cpu")))
    x = torch.ones(1, 2)
    for _ in range(2):
        model(x)
    with pytest.warns(UserWarning, match="A step took 120 B, and the plan's budget is 110 B"):
        model(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(x)

"""Plans of steps that peak in the forward or in the loss, and of models of equal, uneven, shared and no blocks."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from plan_checks import assert_holds, peak_of, planned
from plan_models import Block, Case, InForward, gpt
from torch import Tensor, nn
from torch.nn import functional as F

import reactivate
from reactivate.errors import PlanInfeasible


def test_a_step_that_peaks_in_the_forward() -> None:
    case = Case(InForward(), (torch.randn(4, 32, 16),), loss=lambda out: out.sum())
    plan = planned(case, "90%")
    assert_holds(case, plan)
    assert plan.predicted.peak.seconds <= plan.predicted.forward_seconds


def test_a_step_that_peaks_in_the_loss() -> None:
    case = gpt(layers=3, tokens=2000)
    plan = planned(case, "85%", head="keep")
    assert_holds(case, plan)


@pytest.mark.parametrize("wide", [(16, 1, 1, 1), (1, 1, 1, 16), (2, 8, 1, 4)], ids=["first", "last", "uneven"])
def test_uneven_blocks(wide: tuple[int, ...]) -> None:
    case = gpt(layers=4, wide=wide)
    plan = planned(case, "70%")
    assert_holds(case, plan)


def test_placement_matters() -> None:
    """Of equal blocks it is not the first that are recomputed: what those hold is there at the peak of the others."""
    case = gpt(layers=8)
    plan = planned(case, "60%")
    assert_holds(case, plan)
    counts = Counter(decision.candidate.name for decision in plan.decisions)
    assert len(counts) > 1 and plan.decisions[-1].held_bytes >= plan.decisions[0].held_bytes


class Giant(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([Block(16), nn.Sequential(*(Block(16) for _ in range(6))), nn.Linear(16, 16)])
        self.body = nn.Sequential(self.parts[0], self.parts[1])

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


def test_one_giant_block() -> None:
    case = Case(Giant(), (torch.randn(4, 64, 16),), loss=lambda out: out.sum())
    plan = planned(case, "60%")
    assert_holds(case, plan)


class LoRA(nn.Module):
    def __init__(self, inner: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.inner = inner.requires_grad_(False)
        self.down = nn.Linear(inner.in_features, rank, bias=False)
        self.up = nn.Linear(rank, inner.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + self.up(self.down(x))


def test_a_frozen_trunk_with_adapters() -> None:
    case = gpt(layers=4)
    case.model.requires_grad_(False)
    for block in case.model.blocks:
        block.attn.qkv = LoRA(block.attn.qkv)
    plan = planned(case, "60%")
    assert plan.fixed.gradients == sum(item.nbytes for item in case.model.parameters() if item.requires_grad)
    assert_holds(case, plan)


def test_gradients_of_several_batches_are_accumulated() -> None:
    case = gpt(layers=4)
    parts = [torch.randint(64, (4, 64)), torch.randint(64, (2, 64))]

    def step() -> None:
        for tokens in parts:
            logits = case.model(tokens)
            F.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()

    plan = reactivate.plan(case.model, budget="60%", step=step)
    assert plan.made_for.loss == "step()"
    assert plan.fixed.total + peak_of(case, plan, step) <= plan.budget_bytes
    own = plan.plain.peak_bytes - plan.fixed.total
    assert abs(plan.predicted.peak_bytes - plan.fixed.total - peak_of(case, plan, step)) <= 0.01 * own


def test_no_block_structure() -> None:
    layers: list[nn.Module] = []
    for _ in range(6):
        layers += [nn.Linear(32, 32), nn.GELU()]
    case = Case(nn.Sequential(*layers), (torch.randn(64, 32),), loss=lambda out: out.sum())
    plan = planned(case, "100%")
    assert [decision.path for decision in plan.decisions] == [""]
    with pytest.raises(PlanInfeasible) as caught:
        plan.at(plan.fixed.total + 1)
    smallest = plan.at(caught.value.least_bytes)
    assert smallest.fixed.total + peak_of(case, smallest) <= caught.value.least_bytes


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block, self.last = Block(16), Block(16)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(4):
            x = self.block(x)
        return self.last(x)


def test_a_block_that_runs_several_times() -> None:
    case = Case(Shared(), (torch.randn(4, 64, 16),), loss=lambda out: out.sum())
    plan = planned(case, "60%")
    assert [decision.path for decision in plan.decisions] == ["block", "last"]
    assert_holds(case, plan)


def test_the_table_says_what_is_done_in_all_calls_of_a_layer() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(
                nn.TransformerEncoderLayer(32, 2, 128, dropout=0.0, batch_first=True) for _ in range(2)
            )

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(3):
                for layer in self.layers:
                    x = layer(x)
            return x

    plan = reactivate.plan(Shared(), torch.randn(8, 64, 32), budget="60%", device="H100-SXM")
    assert all(decision.held_bytes > 0 for decision in plan.decisions)

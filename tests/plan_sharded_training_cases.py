"""Plans of models that `fully_shard` has sharded already, in their training, and what is refused. `ranks` runs them."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from plan_cases import assert_same, batch, loss_of, model_of
from plan_sharded_cases import sharded
from ranks import Cases, case
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import reactivate
from reactivate._torch import ops
from reactivate._torch.private_api import Missing
from reactivate.errors import PlanInfeasible, UnsupportedError, UsageError

CASES: Cases = {}


@case(CASES, 2)
def a_budget_in_bytes_is_one_of_each_rank() -> None:
    model = sharded()
    share = reactivate.plan(model, batch(), budget="60%", loss=loss_of, group=dist.group.WORLD)
    plan = share.at(share.budget_bytes)
    assert plan.budget_bytes == share.budget_bytes >= plan.predicted.peak_bytes
    with pytest.raises(PlanInfeasible) as found:
        share.at(plan.fixed.total + 1)
    least = share.at(found.value.least_bytes)
    assert least.predicted.peak_bytes <= found.value.least_bytes < share.predicted.peak_bytes


@case(CASES, 2)
def a_model_is_planned_in_the_middle_of_its_training() -> None:
    """Weights that an evaluation has left gathered are sharded again, and the optimizer's state counts in parts."""
    model, plain = sharded(), sharded()
    optimizers = [torch.optim.AdamW(item.parameters()) for item in (model, plain)]

    def step(item: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        torch.manual_seed(1)
        loss_of(item(batch())).backward()
        optimizer.step()
        optimizer.zero_grad()

    step(model, optimizers[0])
    step(plain, optimizers[1])
    for item in (model, plain):
        with torch.no_grad():
            item(batch())
    plan = reactivate.plan(model, batch(), budget="60%", loss=loss_of, group=dist.group.WORLD, optimizer=optimizers[0])
    assert plan.fixed.optimizer >= 2 * plan.fixed.parameters
    reactivate.apply(model, plan)
    step(model, optimizers[0])
    step(plain, optimizers[1])
    assert_same(model, plain)


@case(CASES, 2)
def the_ranks_of_a_sharded_model_need_a_group() -> None:
    with pytest.raises(UsageError, match=r"all ranks need the same plan.*group=torch.distributed.group.WORLD"):
        reactivate.plan(sharded(), batch(), budget="60%", loss=loss_of)


class Counting(nn.Module):
    """A model whose work depends on values that it computes, on one rank."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = model_of(2)

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.inner(tokens)
        return logits[:, : max(1, int((logits > 0).sum().item()) % 64)] if dist.get_rank() else logits


@case(CASES, 2)
def a_step_that_one_rank_cannot_simulate_is_refused() -> None:
    """The other one would run no step with it."""
    model = Counting()
    fully_shard(model)
    kind, words = (
        (UnsupportedError, "run it together, if all of them need it") if dist.get_rank() else (UsageError, "rank 1")
    )
    with pytest.raises(kind, match=words):
        reactivate.plan(model, batch(), budget="60%", group=dist.group.WORLD)


@case(CASES, 2)
def a_torch_that_does_not_show_its_shards_is_refused() -> None:
    model = sharded()
    found = ops._FakeWork
    ops._FakeWork = Missing("torch._C._distributed_c10d.FakeWork")
    try:
        with pytest.raises(UnsupportedError):
            reactivate.plan(model, batch(), budget="60%", loss=loss_of, group=dist.group.WORLD)
    finally:
        ops._FakeWork = found

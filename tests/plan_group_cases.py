"""Ranks that plan one step together. `ranks` runs them."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from plan_cases import Counted, assert_same, batch, loss_of, model_of
from plan_models import DIM, Mixture
from ranks import Cases, case, refused
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import reactivate
from reactivate._passes.observing import observed_by
from reactivate.errors import PlanInfeasible, UnsupportedError, UsageError
from reactivate.planner.plan import Plan

CASES: Cases = {}
SHORT = timedelta(seconds=3)


def planned(model: nn.Module, budget: int | str = "60%", tokens: Any = None, **options: Any) -> Plan:
    tokens = batch() if tokens is None else tokens
    return reactivate.plan(model, tokens, budget=budget, loss=loss_of, group=dist.group.WORLD, **options)


def of_all_ranks(value: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def assert_agreed(plan: Plan) -> None:
    candidates = [(item.path, item.candidate.name) for item in plan.decisions]
    assert of_all_ranks(candidates) == [candidates] * dist.get_world_size()
    assert any(name != "keep" for _, name in candidates)
    assert plan.predicted.peak_bytes <= plan.budget_bytes


@case(CASES, 2)
def ranks_with_other_batches_have_one_policy() -> None:
    """The rank whose batch is larger leads: its plan is proved on both."""
    wide = dist.get_rank() + 1
    tokens = torch.randint(64, (2 * wide, 64), generator=torch.Generator().manual_seed(0))
    model = DistributedDataParallel(model_of())
    alone = of_all_ranks(planned(model, "100%", tokens).plain.peak_bytes)
    budget = int(0.7 * alone[1])
    assert alone[0] < budget < alone[1]  # the first rank would keep everything
    plan = planned(model, budget, tokens)
    assert_agreed(plan)
    assert plan.budget_bytes == budget and plan.predicted.peak_bytes < plan.plain.peak_bytes
    reactivate.apply(model, plan)
    assert_same(model, DistributedDataParallel(model_of()))


@case(CASES, 2)
def the_smallest_budget_is_that_of_all() -> None:
    model = model_of()
    whole = planned(model, "100%").plain.peak_bytes
    plan = planned(model, int(whole * (0.65 if dist.get_rank() else 5)))
    assert_agreed(plan)
    peaks = of_all_ranks(plan.predicted.peak_bytes)
    assert max(peaks) <= int(0.65 * whole)
    other = plan.at(int(0.8 * whole))
    assert_agreed(other)
    assert other.predicted.peak_bytes > plan.predicted.peak_bytes


@case(CASES, 2)
def the_least_budget_is_that_of_all() -> None:
    tokens = torch.randint(64, (2 + 2 * dist.get_rank(), 64), generator=torch.Generator().manual_seed(0))
    model = model_of()
    with pytest.raises(PlanInfeasible) as found:
        planned(model, 1000, tokens)
    least = of_all_ranks(found.value.least_bytes)
    assert least[0] == least[1]
    assert_agreed(planned(model, least[0], tokens))


@case(CASES, 2)
def other_models_are_refused_on_every_rank() -> None:
    model = model_of(4 + dist.get_rank())
    with refused(UsageError, "the model of rank 1 differs from that of rank 0", "5 for 4"):
        planned(model)
    wide = model_of(4)
    if dist.get_rank():
        wide.blocks[2].mlp[1] = nn.Linear(32, 128, bias=False)
    with refused(UsageError, "the model of rank 1", "blocks.2"):
        planned(wide)
    assert_agreed(planned(model_of()))  # the group is as it was


@case(CASES, 2)
def an_error_of_one_rank_is_one_of_all() -> None:
    def broken(logits: Any) -> Any:
        if dist.get_rank():
            raise ValueError("no targets here")
        return loss_of(logits)

    words = ("no targets",) if dist.get_rank() else ("rank 1 of the 2", "no targets")
    with refused(ValueError if dist.get_rank() else UsageError, *words):
        reactivate.plan(model_of(), batch(), budget="60%", loss=broken, group=dist.group.WORLD)
    assert_agreed(planned(model_of()))


@case(CASES, 2, timeout=SHORT)
def a_rank_that_does_not_come_is_waited_for_no_longer_than_the_group_says() -> None:
    if dist.get_rank():
        time.sleep(SHORT.total_seconds() + 2)
        return
    with refused(RuntimeError):
        planned(model_of())


def mixture() -> tuple[Mixture, torch.Tensor]:
    torch.manual_seed(0)
    model = Mixture()
    return model, torch.randn(8, 64, DIM, generator=torch.Generator().manual_seed(dist.get_rank()))


def step_of(model: nn.Module, x: torch.Tensor) -> None:
    torch.manual_seed(1 + dist.get_rank())
    out = model(x)  # alive during the backward
    out.square().mean().backward()


def planned_mixture(wrap: Callable[[nn.Module], nn.Module]) -> None:
    """Experts' loads are numbers: the ranks run one step together, and simulate the others by themselves."""
    model, x = mixture()
    model = wrap(model)
    plan = reactivate.plan(model, x, budget="65%", loss=lambda out: out.square().mean(), group=dist.group.WORLD)
    assert_agreed(plan)
    assert plan.proof.method == "simulated" and plan.proof.margin_bytes
    plain = wrap(mixture()[0])
    gradients = []
    for each in (model, plain):
        handle = reactivate.apply(each, plan) if each is model else None
        counted = Counted()
        with observed_by(counted):
            step_of(each, x)
        assert (counted.recomputations > 0) == (handle is not None)
        gradients.append([whole(parameter.grad) for parameter in each.parameters()])
    assert all(map(torch.equal, *gradients))


def whole(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def sharded(model: nn.Module) -> nn.Module:
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


@case(CASES, 2)
def a_mixture_of_experts() -> None:
    planned_mixture(DistributedDataParallel)


@case(CASES, 2)
def a_sharded_mixture_of_experts() -> None:
    planned_mixture(sharded)


@case(CASES, 2)
def what_goes_only_alone_is_refused() -> None:
    tries: list[tuple[type[Exception], Callable[[], Any], str]] = [
        (UnsupportedError, lambda: planned(model_of(), 2**20, maximize="batch"), "maximize="),
        (UnsupportedError, lambda: planned(model_of(), storage=reactivate.storage.Disk("/nowhere")), "storage="),
        (UsageError, lambda: planned(model_of(), shapes="adaptive"), "group="),
        (
            UsageError,
            lambda: reactivate.plan(model_of(), batch(), budget="50%", group="world"),
            "takes a process group",
        ),
    ]
    for kind, attempt, word in tries:
        with refused(kind, word):
            attempt()

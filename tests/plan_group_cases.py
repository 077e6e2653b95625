"""Ranks that plan one step together. `ranks` runs them."""

from __future__ import annotations

import os
import time
import warnings
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
from reactivate.planner.progress import older_objects_left_out

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
        (
            UsageError,
            lambda: reactivate.plan(model_of(), batch(), budget="50%", group="world"),
            "takes a process group",
        ),
    ]
    for kind, attempt, word in tries:
        with refused(kind, word):
            attempt()


# -- batches of varying shapes ----------------------------------------------------------------------------------------


def tokens_of(length: int, seed: int) -> torch.Tensor:
    return torch.randint(64, (4, length), generator=torch.Generator().manual_seed(seed))


LENGTHS = [(64, 64), (16, 16), (16, 64), (40, 24), (24, 40), (61, 12), (64, 64)]
"""Of the batches of two ranks, step by step."""


def trained(model: nn.Module, plan: Any = None) -> list[list[torch.Tensor]]:
    """Return the gradients of a few steps, in each of which all ranks have recomputed the same blocks."""
    found = []
    handle = None if plan is None else reactivate.apply(model, plan)
    for number, lengths in enumerate(LENGTHS):
        counted = Counted()
        torch.manual_seed(number)
        with observed_by(counted):
            loss_of(model(tokens_of(lengths[dist.get_rank()], number))).backward()
        recomputed = of_all_ranks(counted.recomputations)
        assert len(set(recomputed)) == 1 and (recomputed[0] > 0) == (plan is not None and max(lengths) > 16)
        found.append([whole(parameter.grad).clone() for parameter in model.parameters()])
        model.zero_grad()
    if handle is not None:
        handle.remove()
    return found


def assert_trains_as_plain(wrap: Callable[[nn.Module], nn.Module], budget: str = "40%") -> Any:
    model = wrap(model_of())
    lengths = LENGTHS[0]
    plan = planned(model, budget, tokens_of(lengths[dist.get_rank()], 0), shapes="adaptive")
    ours, theirs = trained(model, plan), trained(wrap(model_of()))
    assert all(torch.equal(one, other) for mine, its in zip(ours, theirs) for one, other in zip(mine, its))
    known = [(str(each.shapes), [(path, item.name) for path, item in each.candidates.items()]) for each in plan.classes]
    assert of_all_ranks(known) == [known] * 2
    return plan


@case(CASES, 2)
def sharded_ranks_have_one_plan_for_each_class_of_shapes() -> None:
    """A recomputation may gather parameters, so that all ranks have to recompute the same blocks, whatever their batches."""

    plan = assert_trains_as_plain(sharded)
    long, short, middle = plan.classes
    assert long.plain_bytes > middle.plain_bytes > plan.budget_bytes > short.plain_bytes
    assert all(one.peak_bytes <= plan.budget_bytes for one in plan.classes)
    assert long.recomputed and middle.recomputed and not short.recomputed  # how many of them is a matter of times
    # Made in the midst of a forward, it takes what it would take between two steps.
    planner = plan._planner_of(sharded(model_of()), (tokens_of(40, 0),), {})
    with older_objects_left_out():
        planner.trace_plain()
        trace, _ = planner.attempt(middle.candidates)
    total = planner.fixed.total
    assert (middle.plain_bytes, middle.peak_bytes) == (total + planner.plain.peak_bytes, total + trace.needed_bytes)


@case(CASES, 2)
def ranks_that_call_a_planned_model_in_unlike_ways_are_told() -> None:
    model = model_of()
    plan = planned(model, "40%", tokens_of(64, 0), shapes="adaptive")
    reactivate.apply(model, plan)
    with refused(UsageError, "rank 1 calls the model with", "at the same time"):
        model(tokens_of(64, 0).to(torch.int32 if dist.get_rank() else torch.int64))


@case(CASES, 2)
def an_adaptive_plan_is_tightened_for_all_ranks() -> None:
    """One runs out of memory: both go on with plans that they make anew, and the gradients are those of the plain step."""
    model, plain = sharded(model_of()), sharded(model_of())
    reactivate.apply(model, planned(model, "60%", tokens_of(64, 0), shapes="adaptive"))
    os.environ["SHORT"] = "once"  # which nothing puts back

    @reactivate.retry_on_oom
    def step(subject: nn.Module) -> None:
        torch.manual_seed(0)
        loss = loss_of(subject(tokens_of(64, dist.get_rank())))
        if dist.get_rank() and os.environ.pop("SHORT", None):
            raise torch.OutOfMemoryError("tried to allocate 300 KiB")
        loss.backward()

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        step(model)
    assert any("ran out of memory" in str(item.message) for item in said)
    torch.manual_seed(0)
    loss_of(plain(tokens_of(64, dist.get_rank()))).backward()
    for one, other in zip(model.parameters(), plain.parameters()):
        assert torch.equal(whole(one.grad), whole(other.grad))
    handle = reactivate.Handle.of(model)
    assert handle is not None
    found: Any = handle.policy
    chosen = [[(path, item.name) for path, item in each.candidates.items()] for each in found.classes]
    assert of_all_ranks(chosen) == [chosen] * 2 and chosen
    budgets = of_all_ranks(found.budget_bytes)
    assert budgets[1] < budgets[0]


@case(CASES, 2)
def wrapped_ranks_have_one_plan_for_each_class_of_shapes() -> None:
    assert_trains_as_plain(DistributedDataParallel)

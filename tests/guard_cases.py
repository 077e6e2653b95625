"""Guarded steps on several ranks, of which one or all run out of memory. `ranks` runs them."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from journal import Journal
from oracle import assert_bitwise, random_states
from plan_cases import batch, loss_of
from plan_models import GPT
from ranks import Cases, case
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import reactivate
from reactivate import Plan
from reactivate._inspect import sharded as sharded_module
from reactivate.errors import ReactivateError

CASES: Cases = {}
SHORT = timedelta(seconds=4)
STEPS = 4


class Failing:
    """Raises an allocator's error at some places, under plans that have too much.

    Args:
        places: {number of the step: (place, ranks on which it is raised, how often)}.
    """

    def __init__(self, places: dict[int, tuple[str, tuple[int, ...], int]]) -> None:
        self.places = places
        self.now, self.failed = 0, Journal()
        self.model: nn.Module | None = None

    def __call__(self, place: str) -> None:
        where, ranks, times = self.places.get(self.now, ("", (), 0))
        handle = None if self.model is None else reactivate.Handle.of(self.model)
        if place != where or dist.get_rank() not in ranks or handle is None or not isinstance(handle.policy, Plan):
            return
        if list(self.failed).count(self.now) < times:
            self.failed.append(self.now)
            raise torch.OutOfMemoryError("Out of memory. Tried to allocate 64.00 KiB. The device has no more.")

    def is_short(self, rank: int) -> bool:
        return any(rank in ranks for _, ranks, _ in self.places.values())


class Model(GPT):
    """With running statistics, and places where memory runs out."""

    def __init__(self) -> None:
        super().__init__(layers=3)
        self.statistics = nn.BatchNorm1d(32)
        self.fails: Callable[[str], None] = Failing({})

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.statistics(self.embed(tokens).transpose(1, 2)).transpose(1, 2)
        for index, block in enumerate(self.blocks):
            x = block(x)
            if index == 1:
                self.fails("forward")
                x.register_hook(lambda gradient: self.fails("backward"))
        return self.head(self.norm(x))


def wrapped(model: nn.Module, **options: Any) -> nn.Module:
    return DistributedDataParallel(model, bucket_cap_mb=0.02, **options)


def sharded(model: nn.Module) -> nn.Module:
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def made(wrap: Callable[[nn.Module], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return wrap(Model())


def inner_of(model: nn.Module) -> Any:
    return getattr(model, "module", model)


def state_of(model: nn.Module) -> dict[str, Tensor]:
    found = {**model.state_dict(), **{f"gradient {name}": item.grad for name, item in model.named_parameters()}}
    return {name: item.full_tensor() if hasattr(item, "full_tensor") else item for name, item in found.items()}


def trained(
    model: nn.Module, guard: Callable[[Any], Any] = lambda step: step, fails: Failing | None = None, parts: int = 1
) -> tuple[dict[str, Tensor], Any]:
    """Return what some steps leave, and the plan that is applied by then."""
    fails = fails or Failing({})
    inner_of(model).fails, fails.model = fails, model
    torch.manual_seed(1 + dist.get_rank())
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    losses = []

    @guard
    def step(batches: list[Tensor]) -> Tensor:
        optimizer.zero_grad()
        for number, tokens in enumerate(batches, start=1):
            is_added = number == 1 < len(batches) and hasattr(model, "no_sync")
            with model.no_sync() if is_added else nullcontext():
                loss = loss_of(model(tokens))
                loss.backward()
        fails("before the optimizer")
        optimizer.step()
        fails("after the optimizer")
        return loss.detach()

    for number in range(STEPS):
        fails.now = number
        losses.append(step(list(batch().roll(number, 1).chunk(parts))))
    found = {f"loss {number}": loss for number, loss in enumerate(losses)} | state_of(model) | random_states()
    handle = reactivate.Handle.of(model)
    return found, None if handle is None else handle.policy


def assert_guarded(
    wrap: Callable[[nn.Module], nn.Module],
    fails: Failing,
    *,
    parts: int = 1,
    guard: Callable[[Any], Any] = reactivate.retry_on_oom,
    **options: Any,
) -> None:
    """Every bit is that of the plain model with enough memory, on every rank."""
    expected, none = trained(made(wrap), parts=parts)
    model = made(wrap)
    plan = reactivate.plan(model, batch().chunk(parts)[0], budget="80%", loss=loss_of, head="keep", **options)
    reactivate.apply(model, plan)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found, applied = trained(model, guard, fails, parts)
    assert none is None and found.keys() == expected.keys()
    for name, value in expected.items():
        assert_bitwise(found[name], value, name)
    own = dist.get_rank()
    for ranks, times in ((ranks, times) for _, ranks, times in fails.places.values()):
        words = "A step ran out of memory" if own in ranks else f"Rank {ranks[0]} ran out of memory"
        is_told = own in ranks or guard is not on_one_rank
        assert len([item for item in told if words in str(item.message)]) >= times * is_told
    assert len(fails.failed) == sum(times for _, ranks, times in fails.places.values() if own in ranks)
    assert any(item.candidate.recompute for item in applied.decisions)
    assert (applied.budget_bytes < plan.budget_bytes) == fails.is_short(own)
    if options:  # one plan for all
        names = [None] * dist.get_world_size()
        dist.all_gather_object(names, [item.candidate.name for item in applied.decisions])
        assert len(set(map(tuple, names))) == 1


@case(CASES, 2)
def a_rank_is_short_wherever_it_is() -> None:
    """In its first step, before it has reduced a gradient, when it has reduced some, and when it has reduced all."""
    places = {0: ("backward", (1,), 2), 1: ("forward", (0,), 1), 2: ("before the optimizer", (1,), 1)}
    assert_guarded(wrapped, Failing({**places, 3: ("backward", (0, 1), 1)}))


@case(CASES, 2)
def a_rank_of_a_sharded_model_is_short() -> None:
    assert_guarded(sharded, Failing({0: ("forward", (1,), 1), 2: ("backward", (0,), 2)}), group=dist.group.WORLD)


@case(CASES, 2)
def a_torch_that_has_no_name_for_sharding_between_steps() -> None:
    name, sharded_module._RESET = sharded_module._RESET, "no such name"
    try:
        assert_guarded(sharded, Failing({0: ("backward", (0,), 1), 2: ("forward", (1,), 1)}), group=dist.group.WORLD)
    finally:
        sharded_module._RESET = name


@case(CASES, 2)
def a_rank_is_short_in_a_micro_batch_and_all_optimizers_are_undone() -> None:
    """Of four, of which all but the first are reduced."""
    places = {1: ("backward", (1,), 1), 2: ("after the optimizer", (0,), 1)}
    guard = functools.partial(reactivate.retry_on_oom, undo_optimizer=True)
    assert_guarded(functools.partial(wrapped, gradient_as_bucket_view=True), Failing(places), parts=4, guard=guard)


@case(CASES, 2)
def where_no_plan_is_tighter_every_rank_says_so() -> None:
    model = made(wrapped)
    reactivate.apply(model, reactivate.plan(model, batch(), budget="80%", loss=loss_of))
    own = dist.get_rank()
    with warnings.catch_warnings(), pytest.raises(torch.OutOfMemoryError if own else ReactivateError) as caught:
        warnings.simplefilter("ignore")
        trained(model, reactivate.retry_on_oom, Failing({0: ("forward", (1,), 99)}))
    assert own or "rank 1 of 2 has run out of memory" in str(caught.value)
    said = "".join([*getattr(caught.value, "__notes__", ()), *map(str, caught.value.args)])
    assert "it has run" in said and "under the least plan" in said
    with reactivate.apply(model, reactivate.policies.none(), replace=True):
        trained(model)  # the ranks have not lost each other


class WithSum(Model):
    """The blocks sum their results over the ranks: a recomputation does, too."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.norm.register_forward_hook(lambda module, args, output: output + summed(output))


def summed(output: Tensor) -> Tensor:
    whole = output.detach().clone()
    dist.all_reduce(whole)
    return whole


@case(CASES, 2, timeout=SHORT)
def a_recomputation_with_collectives_is_not_run_again() -> None:
    """Its other plan would have other ones. The rank that was short raises, and the other one does not wait for ever."""
    torch.manual_seed(0)
    model = WithSum()
    plan = reactivate.plan(model, batch(), budget="80%", loss=loss_of)
    reactivate.apply(model, plan)
    with pytest.raises(torch.OutOfMemoryError if dist.get_rank() else RuntimeError) as caught:
        trained(model, reactivate.retry_on_oom, Failing({0: ("forward", (1,), 1)}))
    said = "".join([*getattr(caught.value, "__notes__", ()), *map(str, caught.value.args)])
    if dist.get_rank():
        assert "a recomputation has a collective (allreduce_)" in said and "The other ranks wait for this one" in said


@case(CASES, 2, timeout=SHORT)
def gradients_that_no_rank_has_reduced_are_not_lost_silently() -> None:
    model = made(sharded)
    reactivate.apply(model, reactivate.plan(model, batch(), budget="80%", loss=loss_of, group=dist.group.WORLD))
    model.fails = Failing({1: ("forward", (0, 1), 1)})
    model.fails.model = model
    step = reactivate.retry_on_oom(lambda: loss_of(model(batch())).backward())
    model.set_requires_gradient_sync(False)
    step()
    model.set_requires_gradient_sync(True)
    model.fails.now = 1
    with pytest.raises(torch.OutOfMemoryError) as caught:
        step()
    said = "".join([*getattr(caught.value, "__notes__", ()), *map(str, caught.value.args)])
    assert "fully_shard has gradients of earlier steps that it has not reduced" in said


@case(CASES, 1)
def the_only_rank_is_short() -> None:
    """The step ends before what communicates for the model has come to its end."""
    every = functools.partial(wrapped, find_unused_parameters=True)
    assert_guarded(every, Failing({0: ("backward", (0,), 1), 2: ("backward", (0,), 1)}))
    assert_guarded(sharded, Failing({0: ("forward", (0,), 1), 2: ("backward", (0,), 1)}))


def on_one_rank(step: Any) -> Any:
    return reactivate.retry_on_oom(step, group=[dist.new_group([rank]) for rank in range(2)][dist.get_rank()])


@case(CASES, 2)
def ranks_of_a_group_are_guarded_alone() -> None:
    assert_guarded(lambda model: model, Failing({1: ("backward", (1,), 1)}), guard=on_one_rank)

"""Plans of models that `fully_shard` has sharded already. `ranks` runs them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from memory import allocated_by
from plan_cases import assert_same, batch, loss_of
from plan_models import GPT
from ranks import Cases, case
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import reactivate

CASES: Cases = {}
WIDE = 96  # so that gathered parameters and the buffers of their gradients are a large part of the peak


def sharded(layers: int = 4, parts: Callable[[nn.Module], list[nn.Module]] = lambda block: [], **options: Any) -> GPT:
    torch.manual_seed(0)
    model = GPT(dim=WIDE, layers=layers)
    for block in model.blocks:
        for part in parts(block):
            fully_shard(part, **options)
        fully_shard(block, **options)
    fully_shard(model, **options)
    return model


def peak_of(model: nn.Module) -> int:
    """The most that a step allocates above what there is before it, gradients among that.

    The least of three steps: threads of gloo let go of their buffers some time after the collective is done.
    """
    tokens = batch()

    def step() -> None:
        logits = model(tokens)  # alive during the backward, as in most training loops
        loss_of(logits).backward()

    step()
    return min(allocated_by(step).peak_bytes for _ in range(3))


def assert_promise_holds(make: Callable[[], GPT]) -> reactivate.Plan:
    """Plan a sharded model; its peak is as promised, and its gradients are those of the plain sharded one.

    A part in a thousand below: the handles of collectives that run are some hundred bytes. Above that as much as the buffer
    of one block's gradients: it is gloo's own while it reduces them, and nobody can say when its thread gives it back.
    """
    model = make()
    parameters = dict(model.named_parameters())
    plan = reactivate.plan(model, batch(), budget="60%", loss=loss_of, group=dist.group.WORLD)
    assert plan.proof.method == "simulated" and plan.predicted.peak_bytes <= plan.budget_bytes
    now = dict(model.named_parameters())
    assert now.keys() == parameters.keys() and all(now[name] is item for name, item in parameters.items())
    assert all(item.grad is None for item in parameters.values())
    buffer_bytes = sum(4 * item.numel() for item in model.blocks[0].parameters())
    for promised, policy in ((plan.plain, None), (plan.predicted, plan)):
        if policy is not None:
            reactivate.apply(model, policy)
        own_bytes = promised.peak_bytes - plan.fixed.total
        found_bytes = peak_of(model)
        assert -own_bytes / 1000 <= found_bytes - own_bytes <= buffer_bytes, (found_bytes, own_bytes, buffer_bytes)
    model.zero_grad()
    assert_same(model, make())
    return plan


@case(CASES, 2)
def a_sharded_model_is_planned_as_it_stands() -> None:
    plan = assert_promise_holds(sharded)
    whole = sum(item.nbytes for item in GPT(dim=WIDE, layers=4).parameters())
    assert plan.fixed.parameters == plan.fixed.gradients == whole // 2
    assert plan.made_for.model == "GPT"


@case(CASES, 2)
def parameters_that_stay_gathered_are_counted() -> None:
    kept = assert_promise_holds(lambda: sharded(reshard_after_forward=False))
    let_go = reactivate.plan(sharded(), batch(), budget="60%", loss=loss_of, group=dist.group.WORLD)
    blocks = sum(item.nbytes for item in GPT(dim=WIDE, layers=4).blocks.parameters())
    assert kept.plain.peak_bytes - let_go.plain.peak_bytes > blocks / 4


@case(CASES, 2)
def mixed_precision_is_counted() -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    assert_promise_holds(lambda: sharded(mp_policy=policy))


@case(CASES, 2)
def units_inside_of_blocks_are_counted() -> None:
    assert_promise_holds(lambda: sharded(parts=lambda block: [block.attn, block.mlp]))


@case(CASES, 2)
def rows_that_cannot_be_shared_evenly() -> None:
    def uneven() -> GPT:
        torch.manual_seed(0)
        model = GPT(dim=WIDE, layers=4, tokens=65)
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        return model

    assert_promise_holds(uneven)

"""Programs of `test_process_groups` with schedules of `torch.distributed.pipelining`, on 2 and 4 processes.

Each process has one stage or two. The blocks of a stage are regions, or a policy makes them so; they have dropout, a norm and
a buffer that each microbatch writes to. Ours runs under `shared_recompute`, so that the two halves of a backward that a
zero-bubble schedule splits share a recomputation. torch's checkpoint runs without: its `GraphExecGroup` refuses a norm.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.utils.checkpoint
from journal import Journal
from process_group_programs import WIDTH, Collectives, Found, Wrap, data, ours, plain
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

import reactivate
from reactivate import policies
from reactivate.storage import Host

STEPS, BATCH, MICROBATCHES = 2, 8, 4


calls = Journal()  # of blocks


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        calls.append(reactivate.is_recomputing())
        self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        hidden = nn.functional.gelu(self.up(self.norm(x) + self.mean))
        return x + nn.functional.dropout(self.down(hidden), 0.2)


class Part(nn.Module):
    """The model of a stage."""

    def __init__(self, wrap: Wrap) -> None:
        super().__init__()
        self.blocks, self.wrap = nn.ModuleList([Block(), Block()]), wrap

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.wrap(block)(x)
        return x


def one_stage(rank: int, ranks: int) -> list[int]:
    return [rank]


def in_turn(rank: int, ranks: int) -> list[int]:
    return [rank, rank + ranks]


def there_and_back(rank: int, ranks: int) -> list[int]:
    return [rank, 2 * ranks - 1 - rank]


def pipelined(wrap: Wrap, *, schedule: Any, stages_of: Callable[[int, int], list[int]], policy: Any = None) -> Found:
    """Train the stages of this process: losses, gradients, parameters and buffers."""
    calls.clear()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    numbers = stages_of(rank, ranks)
    count = ranks * len(numbers)
    parts = {}
    for number in range(count):  # all of them on each process, for the random numbers
        part = Part(plain if policy is not None and wrap is ours else wrap)
        if number in numbers:
            parts[number] = part
            if policy is not None and wrap is ours:
                reactivate.apply(part, policy)
    size = BATCH // MICROBATCHES  # given, since an inference of shapes would write to the buffers
    stages = [
        PipelineStage(
            part,
            number,
            count,
            torch.device("cpu"),
            input_args=torch.zeros(size, WIDTH, requires_grad=number > 0),
            output_args=torch.zeros(size, WIDTH, requires_grad=True),
        )
        for number, part in parts.items()
    ]
    runner = schedule(stages if len(stages) > 1 else stages[0], MICROBATCHES, loss_fn=nn.functional.mse_loss)
    models = nn.ModuleDict({str(number): part for number, part in parts.items()})
    found: Found = {}
    with Collectives() as collectives:
        for step in range(STEPS):
            losses: list[Tensor] = []
            target = {"target": data(step + 10, same=True), "losses": losses} if count - 1 in parts else {}
            with reactivate.shared_recompute() if wrap is ours else nullcontext():
                runner.step(*([data(step, same=True)] if 0 in parts else []), **target)
            found |= {f"loss {step}, {index}": loss.detach() for index, loss in enumerate(losses)}
            with torch.no_grad():
                for name, parameter in models.named_parameters():
                    assert parameter.grad is not None
                    found[f"gradient of {name}, step {step}"] = parameter.grad
                    parameter -= 0.1 * parameter.grad
                    parameter.grad = None
    found |= {name: value.detach().clone() for name, value in models.state_dict().items()}
    found["collectives"] = dict(collectives.counts)
    found["calls"] = len(calls)
    return found


def killed_in_a_pipeline() -> None:
    """The last process dies in the recomputation of a stage."""

    def wrap(block: nn.Module) -> Any:
        def fn(x: Tensor) -> Tensor:
            if reactivate.is_recomputing() and dist.get_rank() == dist.get_world_size() - 1:
                os._exit(3)
            return block(x)  # type: ignore[no-any-return]

        return reactivate.checkpoint(fn)

    pipelined(wrap, **ZERO_BUBBLE)


APPLIED = policies.first_match(
    policies.save_ops("linear", storage=Host()), policies.recompute_modules("blocks.*", inputs=Host())
)
ZERO_BUBBLE = {"schedule": ScheduleInterleavedZeroBubble, "stages_of": in_turn}
ALL: dict[str, Callable[[Wrap], Found]] = {
    "pipeline, GPipe": partial(pipelined, schedule=ScheduleGPipe, stages_of=one_stage),
    "pipeline, 1F1B": partial(pipelined, schedule=Schedule1F1B, stages_of=one_stage),
    "pipeline, interleaved 1F1B": partial(pipelined, schedule=ScheduleInterleaved1F1B, stages_of=in_turn),
    "pipeline, zero bubble": partial(pipelined, **ZERO_BUBBLE),
    "pipeline, zero bubble, applied": partial(pipelined, **ZERO_BUBBLE, policy=APPLIED),
    "pipeline, zero bubble V": partial(pipelined, schedule=ScheduleZBVZeroBubble, stages_of=there_and_back),
}
# With an older torch the first exchange between the stages fails on gloo, whatever the stages are.
RUNS_ON_GLOO = hasattr(torch.utils.checkpoint, "GraphExecGroup")
PIPELINES = ALL if RUNS_ON_GLOO else {}
FAILURES: dict[str, Callable[[], None]] = {"killed in a pipeline": killed_in_a_pipeline} if RUNS_ON_GLOO else {}

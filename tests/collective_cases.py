"""Regions that save calls and run collectives, on ranks that are late by random times. `ranks` runs them."""

from __future__ import annotations

import functools
import gc
import random
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from oracle import Ran, assert_bitwise, random_states, seed_everything
from process_group_programs import Collectives
from ranks import Cases, case
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.overrides import TorchFunctionMode

import reactivate
from reactivate import policies
from reactivate._engine.record import observed_by

CASES: Cases = {}
WIDTH, TIMES = 16, 3
SAVING = policies.first_match(policies.save("collectives"), policies.full())


class Late(TorchFunctionMode):
    """Lets each rank wait for random times before its ops, and collectives be done before or after what follows them.

    No dispatch mode: under one, what the threads of a process group write moves no version.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._random = random.Random(97 * seed + dist.get_rank())

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_collective = "c10d" in getattr(func, "_qualified_op_name", str(func))
        self._sleep(0.3 if is_collective else 0.01)
        result = func(*args, **(kwargs or {}))
        self._sleep(0.5 if is_collective else 0.0)
        return result

    def _sleep(self, chance: float) -> None:
        if self._random.random() < chance:
            time.sleep(self._random.random() / 50)


def local(value: Any) -> Any:
    return value.to_local() if isinstance(value, DTensor) else value


Make = Callable[[bool], tuple[nn.Module, Callable[[int], Tensor]]]


def trained(make: Make, *, is_ours: bool, backwards: int) -> tuple[dict[str, Any], Ran]:
    """Train for two steps: what there is to compare, and what the regions did."""
    seed_everything()
    model, forward = make(is_ours)
    seed_everything(dist.get_rank())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found, ran = {}, Ran()
    with observed_by(ran):
        for step in range(2):
            loss = forward(step)
            for index in range(backwards):
                loss.backward(retain_graph=index + 1 < backwards)
            found[f"loss {step}"] = local(loss.detach())
            for name, parameter in model.named_parameters():
                found[f"gradient of {name}, step {step}"] = local(parameter.grad).clone()
            optimizer.step()
            optimizer.zero_grad()
    return found | random_states(), ran


def check(make: Make, *, backwards: int = 1) -> None:
    """Hold trainings with a policy, on ranks that are late, against the plain one: several times, with other delays."""
    with Collectives() as plain:
        expected, _ = trained(make, is_ours=False, backwards=backwards)
    with Collectives() as ours:
        trained(make, is_ours=True, backwards=backwards)
    assert "recomputed" not in ours.counts and ours.counts == plain.counts
    for seed in range(TIMES):
        with Late(seed):
            found, ran = trained(make, is_ours=True, backwards=backwards)
        assert ran.regions > 0 and ran.recomputations == backwards * ran.regions
        assert expected.keys() == found.keys()
        for name, value in expected.items():
            assert_bitwise(value, found[name], name)


def data(step: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(100 * step + dist.get_rank()))


# -- decisions of ranks -----------------------------------------------------------------------------------------------


class Block(nn.Module):
    """A block of which sequence parallelism leaves each rank a part of the sequence in front of and behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.dropout(nn.functional.gelu(self.up(self.norm(x)))))


def parallel(model: nn.Sequential, mesh: DeviceMesh, *, is_dtensor: bool = False) -> None:
    for block in model:
        plan = {
            "norm": SequenceParallel(use_local_output=False),
            "up": ColwiseParallel(input_layouts=Shard(1), use_local_output=not is_dtensor),
            "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=not is_dtensor),
        }
        parallelize_module(block, mesh, plan)


def sequence_parallel(is_ours: bool, *, is_dtensor: bool = False, is_sharded: bool = False) -> Any:
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("data", "tensor"))
    model = nn.Sequential(Block(), Block(), Block())
    parallel(model, mesh["tensor"], is_dtensor=is_dtensor)
    if is_ours:
        reactivate.apply(model, SAVING)
    if is_sharded:
        for block in model:
            fully_shard(block, mesh=mesh["data"])
        fully_shard(model, mesh=mesh["data"])

    def forward(step: int) -> Tensor:
        x = data(step, 2, 4, WIDTH)
        out = model(DTensor.from_local(x, mesh["tensor"], [Shard(1)]) if is_dtensor else x)
        return local(out).square().mean()  # type: ignore[no-any-return]

    return model, forward


@case(CASES, 2)
def sequence_parallelism_that_saves_collectives() -> None:
    check(sequence_parallel)


@case(CASES, 2)
def sequence_parallelism_with_sharded_tensors_between_the_blocks() -> None:
    check(functools.partial(sequence_parallel, is_dtensor=True))


@case(CASES, 2)
def sequence_parallelism_with_a_retained_graph() -> None:
    check(sequence_parallel, backwards=2)


@case(CASES, 2, 4)
def sequence_parallelism_inside_of_fully_shard() -> None:
    check(functools.partial(sequence_parallel, is_sharded=True))


class Gathering(nn.Module):
    """Functional collectives of all kinds, some of which run while something else is computed, one behind another."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        group = dist.group.WORLD
        hidden = self.inner(x)
        gathered = functional.all_gather_tensor(hidden.detach(), 0, group)
        other = self.outer(x).tanh()  # meanwhile
        summed = functional.all_reduce(gathered.sin(), "sum", group)
        scattered = functional.reduce_scatter_tensor(summed * gathered, "sum", 0, group)
        rows = functional.all_to_all_single_autograd(hidden.exp(), None, None, group)
        return (rows.sin() * other + scattered).tanh()


def gathering(is_ours: bool) -> Any:
    model = nn.Sequential(Gathering(), Gathering())
    if is_ours:
        reactivate.apply(model, SAVING)
    return model, lambda step: model(data(step, 4, WIDTH)).square().mean()


@case(CASES, 2)
def functional_collectives_that_are_saved() -> None:
    check(gathering)


class Trailing(nn.Module):
    """A collective behind the last tensor that the backward needs, if what holds the others has been collected by then."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.linear(x).sin()
        summed = hidden.detach().cos()
        dist.all_reduce(summed)
        return hidden, (hidden * summed).exp()


@case(CASES, 2)
def the_collector_runs_on_one_rank_only() -> None:
    """One of the outputs is garbage in a cycle: what its graph saved is gone on one rank before the backward."""
    block = reactivate.checkpoint(Trailing())
    gc.disable()
    try:
        for step in range(3):
            x = data(step, 4, WIDTH).requires_grad_()
            out, other = block(x)
            cycle: list[Any] = [other]
            cycle.append(cycle)
            del other, cycle
            if dist.get_rank() == step % 2:
                gc.collect()
            out.sum().backward()
            dist.barrier()
    finally:
        gc.enable()


@case(CASES, 2)
def one_rank_writes_to_a_tensor_without_a_copy() -> None:
    """The first rank logs into a large tensor: its recomputations end where those of the other rank do."""
    log = torch.zeros(64, 512)
    linear = nn.Linear(WIDTH, WIDTH)

    def fn(x: Tensor) -> Tensor:
        hidden = linear(x).sin()
        if dist.get_rank() == 0:
            log[0, :4] = hidden.detach().flatten()[:4]
        summed = hidden.detach().cos()
        dist.all_reduce(summed)
        return hidden + summed

    region = reactivate.checkpoint(fn)
    for step in range(3):
        region(data(step, 4, WIDTH).requires_grad_()).sum().backward()
        dist.barrier()

"""Regions that save calls and run collectives, on ranks that are late by random times. `ranks` runs them."""

from __future__ import annotations

import functools
import gc
import random
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from collectives_in_place import ALONE, IN_PLACE
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
from reactivate._passes.observing import observed_by

CASES: Cases = {}
# torch 2.13 has other names for them.
functional_all_gather = getattr(functional, "all_gather_single", None) or functional.all_gather_tensor
functional_reduce_scatter = getattr(functional, "reduce_scatter_single", None) or functional.reduce_scatter_tensor
WIDTH, TIMES = 16, 3
SHORT = timedelta(seconds=15)  # after which ranks that wait for each other fail
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


@case(CASES, 2, timeout=SHORT)
def sequence_parallelism_that_saves_collectives() -> None:
    check(sequence_parallel)


@case(CASES, 2, timeout=SHORT)
def sequence_parallelism_with_sharded_tensors_between_the_blocks() -> None:
    check(functools.partial(sequence_parallel, is_dtensor=True))


@case(CASES, 2, timeout=SHORT)
def sequence_parallelism_with_a_retained_graph() -> None:
    check(sequence_parallel, backwards=2)


@case(CASES, 2, 4, timeout=SHORT)
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
        gathered = functional_all_gather(hidden.detach(), 0, group)
        other = self.outer(x).tanh()  # meanwhile
        summed = functional.all_reduce(gathered.sin(), "sum", group)
        scattered = functional_reduce_scatter(summed * gathered, "sum", 0, group)
        rows = functional.all_to_all_single_autograd(hidden.exp(), None, None, group)
        return (rows.sin() * other + scattered).tanh()


def gathering(is_ours: bool) -> Any:
    model = nn.Sequential(Gathering(), Gathering())
    if is_ours:
        reactivate.apply(model, SAVING)
    return model, lambda step: model(data(step, 4, WIDTH)).square().mean()


@case(CASES, 2, timeout=SHORT)
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


@case(CASES, 2, timeout=SHORT)
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


@case(CASES, 2, timeout=SHORT)
def ranks_differentiate_different_outputs() -> None:
    """One rank needs nothing of what comes after the collective."""
    first, second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        summed = x.detach().cos()
        hidden = first(x).sin()
        dist.all_reduce(summed)
        return hidden, second(x).sin() * summed

    region = reactivate.checkpoint(fn)
    for step in range(2):
        out = region(data(step, 4, WIDTH).requires_grad_())[dist.get_rank()]
        out.sum().backward()
        dist.barrier()


@case(CASES, 2, timeout=SHORT)
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


# -- collectives in place ---------------------------------------------------------------------------------------------


class Collective(nn.Module):
    """A linear layer, whose result a collective changes in place, as it is summed over tensor-parallel ranks."""

    def __init__(self, collective: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.collective = nn.Linear(WIDTH, WIDTH), collective

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.linear(x)
        before = (2 * hidden).tanh()
        with torch.no_grad():
            self.collective(hidden)
        return (hidden.sin() * hidden * before).exp()


def gradients(model: nn.Module, region: Callable[..., Any], step: int, after: Callable[..., Any] | None = None) -> Any:
    """Run a step: the outputs, the gradients, and what `after` the forward has returned of the outputs."""
    x = data(step, 4, WIDTH).requires_grad_()
    out = region(x)
    found = [] if after is None else [after(out)]
    outputs = out if isinstance(out, tuple) else (out,)
    sum(item.square().sum() for item in outputs if item.requires_grad).backward()  # type: ignore[union-attr]
    found += [*outputs, x.grad, *(parameter.grad for parameter in model.parameters())]
    model.zero_grad()
    return [None if item is None else item.detach().clone() for item in found]


def check_saving(model: nn.Module, policy: Any, after: Callable[..., Any] | None = None, fn: Any = None) -> None:
    """Hold regions that save calls against the plain model, where nothing but metadata is compared."""
    seed_everything()
    expected = [gradients(model, fn or model, step, after) for step in range(3)]
    region, ran = reactivate.checkpoint(fn or model, policy=policy, check="metadata"), Ran()
    with observed_by(ran):
        found = [gradients(model, region, step, after) for step in range(3)]
    assert ran.regions == ran.recomputations == 3
    for step, (one, other) in enumerate(zip(expected, found, strict=True)):
        for index, (tensor, ours) in enumerate(zip(one, other, strict=True)):
            assert_bitwise(tensor, ours, f"tensor {index} of step {step}")


@case(CASES, 2, timeout=SHORT)
def collectives_in_place_after_a_saved_call() -> None:
    ALONE[:] = [dist.new_subgroups(1)[0]]
    for name, collective in IN_PLACE.items():
        for policy in (policies.save_ops("linear"), policies.save_modules("linear")):
            try:
                check_saving(Collective(collective), policy)
            except BaseException as error:
                raise AssertionError(f"{name} with {policy}") from error


class InPlace(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        dist.all_reduce(x)
        return x


class Reduce(torch.autograd.Function):
    """Sums up the result of a row-parallel layer, as tensor-parallel libraries do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class Row(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear, self.reduce, self.kind = nn.Linear(WIDTH, WIDTH), InPlace(), kind

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.linear(x)
        if self.kind == "function":
            hidden = Reduce.apply(hidden)
        elif self.kind == "module":
            with torch.no_grad():
                self.reduce(hidden)
        elif self.kind == "name":
            with torch.no_grad():
                reactivate.site(dist.all_reduce, name="sum")(hidden)
        else:
            with torch.no_grad():
                dist.all_reduce(hidden, async_op=True).wait()  # type: ignore[union-attr]
        return (hidden.sin() * hidden).exp()


@case(CASES, 2, timeout=SHORT)
def saved_calls_that_run_collectives_in_place() -> None:
    for kind, policy in {
        "function": policies.save_ops(Reduce, "linear"),
        "module": policies.save_modules("linear", "reduce"),
        "name": policies.first_match(policies.save_names("sum"), policies.save_ops("linear")),
        "handle": policies.save_ops("linear"),
    }.items():
        try:
            check_saving(Row(kind), policy)
        except BaseException as error:
            raise AssertionError(kind) from error


class Counting(nn.Module):
    """Routing whose counts leave the region: as an output, and as an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.linear(x)
        counts = hidden.detach().argmax(-1).bincount(minlength=WIDTH)
        self.last = hidden.argmax(-1).bincount(minlength=WIDTH)
        return (hidden + counts + self.last).sin().exp(), counts


@case(CASES, 2, timeout=SHORT)
def collectives_in_place_behind_a_region() -> None:
    """Before the backward, the caller sums up over all ranks what the region has kept."""

    def after(model: Counting, out: tuple[Tensor, Tensor]) -> Tensor:
        dist.all_reduce(out[1])
        dist.all_reduce(model.last)
        return torch.cat([out[1], model.last])

    model = Counting()
    check_saving(model, policies.save("routing"), functools.partial(after, model))

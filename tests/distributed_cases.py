"""The cases of `test_distributed`: trained on two processes, plain and checkpointed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from journal import Journal
from torch import Tensor, nn
from torch.distributed._composable import checkpoint as composable_checkpoint
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import reactivate
from reactivate import policies

PROCESSES = 2
WIDTH = 16

Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]
collectives = Journal()  # that this process has run: the name, and whether it was in a recomputation


@dataclass
class Training:
    """A model, and a step of its training: forward passes and backward passes, which returns the losses."""

    model: nn.Module
    step: Callable[[int], list[Tensor]]


@dataclass
class Case:
    """A case: how to make a training, and what the engine has to do for it in all its steps."""

    make: Callable[[Wrap], Training]
    regions: int
    recomputations: int
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    early_stop: bool = True
    check: str = "first"
    collectives_of_a_recomputation: list[str] | None = None  # that the case itself calls


def plain(fn: Callable[..., Any]) -> Callable[..., Any]:
    return fn


# -- models ------------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """A residual block with dropout. `inside` is put around the body of its forward."""

    def __init__(self, inside: Wrap = plain) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.2)
        self.inside = inside

    def body(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(torch.tanh(self.up(self.norm(x)).sin())))

    def forward(self, x: Tensor) -> Tensor:
        return self.inside(self.body)(x)


class Stack(nn.Module):
    """Blocks, each called through `wrap`."""

    def __init__(self, blocks: list[nn.Module], wrap: Wrap = plain) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.wrap = wrap

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.wrap(block)(x)
        return x


def data(step: int, *, same: bool = False) -> Tensor:
    """A batch: other numbers on each process, unless it is the `same`."""
    seed = 1000 + step + (0 if same else 100 * (1 + dist.get_rank()))
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(seed))


def trains(model: nn.Module, *, same: bool = False) -> Training:
    def step(index: int) -> list[Tensor]:
        loss = model(data(index, same=same)).float().square().mean()
        loss.backward()
        return [loss]

    return Training(model, step)


# -- DistributedDataParallel -------------------------------------------------------------------------------------------


def ddp(wrap: Wrap, *, where: str = "module", **options: Any) -> Training:
    blocks: list[nn.Module] = [Block(wrap if where == "inside" else plain) for _ in range(3)]
    stack = Stack(blocks, wrap if where == "module" else plain)
    return trains(DistributedDataParallel(stack, **options))


def whole_ddp(wrap: Wrap, **options: Any) -> Training:
    """The region is around everything, DistributedDataParallel's own hooks included."""
    return region_around(DistributedDataParallel(Stack([Block() for _ in range(2)]), **options), wrap)


def region_around(model: nn.Module, wrap: Wrap) -> Training:
    def step(index: int) -> list[Tensor]:
        loss = wrap(lambda x: model(x))(data(index)).float().square().mean()
        loss.backward()
        return [loss]

    return Training(model, step)


def ddp_unused(wrap: Wrap, **options: Any) -> Training:
    """Some parameters are never used, some on one process only, some in some steps only."""

    class Choosing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Block() for _ in range(4)])
            self.step = 0

        def forward(self, x: Tensor) -> Tensor:
            first, sometimes, one_process, _never = self.blocks
            x = wrap(first)(x)
            if self.step % 2:
                x = wrap(sometimes)(x)
            return wrap(lambda x: one_process(x) if dist.get_rank() else x.sin().exp())(x)

    training = trains(DistributedDataParallel(Choosing(), find_unused_parameters=True, **options))

    def step(index: int) -> list[Tensor]:
        training.model.module.step = index
        return training.step(index)

    return Training(training.model, step)


def ddp_twice(wrap: Wrap, **options: Any) -> Training:
    """One module, called twice in one forward pass."""
    block = Block()
    return trains(DistributedDataParallel(Stack([block, Block(), block], wrap), **options))


def ddp_accumulates(wrap: Wrap) -> Training:
    """Two microbatches without synchronisation, the second with two backwards on one graph, and one with it."""
    model = DistributedDataParallel(Stack([Block() for _ in range(2)], wrap))

    def step(index: int) -> list[Tensor]:
        with model.no_sync():
            first = model(data(index)).square().mean()
            first.backward()
            out = model(data(index + 10))
            losses = [out.sin().mean(), out.exp().mean()]
            losses[0].backward(retain_graph=True)
            losses[1].backward()
        last = model(data(index + 20)).square().mean()
        last.backward()
        return [first, *losses, last]

    return Training(model, step)


def ddp_microbatches(wrap: Wrap) -> Training:
    """Two forward passes, then the two backward passes in the same order."""
    model = DistributedDataParallel(Stack([Block() for _ in range(2)], wrap))

    def step(index: int) -> list[Tensor]:
        with model.no_sync():
            losses = [model(data(index + 10 * batch)).square().mean() for batch in range(2)]
            losses[0].backward()
        losses.append(model(data(index + 20)).square().mean())
        (losses[1] + losses[2]).backward()
        return losses

    return Training(model, step)


# -- fully_shard -------------------------------------------------------------------------------------------------------

PLACES: dict[str, Callable[[Wrap], tuple[Wrap, Wrap]]] = {
    # (what is around a block's body, what is around a block)
    "inside": lambda wrap: (wrap, plain),
    "module": lambda wrap: (plain, wrap),
    "around": lambda wrap: (plain, lambda block: wrap(lambda x: block(x))),
}


def sharded(wrap: Wrap, *, place: str, **options: Any) -> Training:
    inside, around = PLACES[place](wrap)
    model = Stack([Block(inside) for _ in range(3)], around)
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    return trains(model)


def whole_sharded(wrap: Wrap) -> Training:
    """The hooks of all shards run in the region, and again in its recomputation, which gathers the parameters."""
    return region_around(sharded(plain, place="module").model, wrap)


def sharded_microbatches(wrap: Wrap) -> Training:
    """Two microbatches that are accumulated; the blocks stay gathered in between."""
    training = sharded(wrap, place="module", reshard_after_forward=False)
    model: Any = training.model

    def step(index: int) -> list[Tensor]:
        losses = []
        for batch in range(2):
            model.set_requires_gradient_sync(batch == 1)
            losses += training.step(index + 10 * batch)
        return losses

    return Training(model, step)


def wrapped_and_sharded(wrap: Wrap, *, composable: bool, **options: Any) -> Training:
    """torch's own ways to checkpoint a module, under `install()`."""
    blocks: list[nn.Module] = [Block() for _ in range(3)]
    if wrap is not plain:
        blocks = [composable_checkpoint(block) if composable else checkpoint_wrapper(block) for block in blocks]
    model = Stack(blocks)
    for block in blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    return trains(model)


def wrapped_in_ddp(wrap: Wrap) -> Training:
    model = Stack([Block() for _ in range(3)])
    if wrap is not plain:
        apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Block))
    return trains(DistributedDataParallel(model, static_graph=True))


# -- a policy for the whole model --------------------------------------------------------------------------------------

KEEPS_LINEAR = policies.first_match(
    policies.save_ops("linear", within="*.up"), policies.save_modules("*.norm"), policies.full()
)


def applied_in_ddp(wrap: Wrap, **options: Any) -> Training:
    model = Stack([Block() for _ in range(3)])
    if wrap is not plain:
        reactivate.apply(model, KEEPS_LINEAR)
    return trains(DistributedDataParallel(model, **options))


def applied_around_ddp(wrap: Wrap) -> Training:
    model = DistributedDataParallel(Stack([Block() for _ in range(3)]))
    if wrap is not plain:
        reactivate.apply(model, KEEPS_LINEAR)
    return trains(model)


def applied_and_sharded(wrap: Wrap, *, first: bool, **options: Any) -> Training:
    """The policy before the shards or after them: `forward` is inside of their hooks either way."""
    model = Stack([Block() for _ in range(3)])
    if wrap is not plain and first:
        reactivate.apply(model, KEEPS_LINEAR)
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    if wrap is not plain and not first:
        reactivate.apply(model, KEEPS_LINEAR)
    return trains(model)


# -- collectives inside of a region ------------------------------------------------------------------------------------


def note(name: str) -> None:
    collectives.append([name, reactivate.is_recomputing()])


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        note("all_reduce")
        total = x.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        note("all_reduce of a gradient")
        total = grad.clone()
        dist.all_reduce(total)
        return total


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        note("all_to_all")
        return _exchanged(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        note("all_to_all of a gradient")
        return _exchanged(grad)


def _exchanged(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    dist.all_to_all_single(out, x.contiguous())
    return out


class SyncNorm(nn.Module):
    """Batch norm with the statistics of all processes.

    torch's `SyncBatchNorm` refuses tensors on a CPU, so this does the same with two sums: running statistics that are
    written once a forward pass, and collectives in the forward and in the backward.
    """

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.zeros(WIDTH))
        self.register_buffer("running_mean", torch.zeros(WIDTH))
        self.register_buffer("running_var", torch.ones(WIDTH))
        self.register_buffer("num_batches_tracked", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        sums = _AllReduce.apply(torch.cat([x.sum(0), x.square().sum(0)])) / (PROCESSES * len(x))
        mean, variance = sums[:WIDTH], sums[WIDTH:] - sums[:WIDTH].square()
        if self.training:
            with torch.no_grad():
                self.num_batches_tracked += 1
                self.running_mean.lerp_(mean, 0.1)
                self.running_var.lerp_(variance, 0.1)
        return (x - mean) * (variance + 1e-5).rsqrt() * self.weight + self.bias


def sync_norm(wrap: Wrap) -> Training:
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), SyncNorm(), nn.Tanh(), nn.Dropout(0.2)) for _ in range(2)]
    return trains(DistributedDataParallel(Stack(list(blocks), wrap), broadcast_buffers=False))


class Experts(nn.Module):
    """Half of the rows go to the other process, through its expert, and come back."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.expert = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        sent = _AllToAll.apply(torch.tanh(self.gate(x)))
        return _AllToAll.apply(torch.nn.functional.dropout(self.expert(sent).exp(), 0.2)) * x


def experts(wrap: Wrap) -> Training:
    return trains(Stack([Experts() for _ in range(2)], wrap))


def collective_at_the_end(wrap: Wrap) -> Training:
    """Nothing that the backward needs comes after it: early stop leaves it out, on both processes or on none."""
    linear = nn.Linear(WIDTH, WIDTH)
    return trains(Stack([Sequence(lambda x: _AllReduce.apply(linear(x).sin().exp()) + 1, linear)], wrap))


def other_needs(wrap: Wrap) -> Training:
    """The processes differentiate different outputs, so that without a collective early stop would end elsewhere."""
    linear = nn.Linear(WIDTH, WIDTH)

    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        h = linear(x).sin()
        return h.exp(), _AllReduce.apply(h.detach()).tanh() * linear(x).cos()

    def step(index: int) -> list[Tensor]:
        outputs = wrap(fn)(data(index))
        loss = outputs[dist.get_rank()].mean()
        del outputs
        loss.backward()
        return [loss]

    return Training(linear, step)


class Sequence(nn.Module):
    """A function with the module whose parameters it uses."""

    def __init__(self, fn: Callable[[Tensor], Tensor], module: nn.Module) -> None:
        super().__init__()
        self.fn, self.module = fn, module

    def forward(self, x: Tensor) -> Tensor:
        return self.fn(x)


def tensor_parallel(wrap: Wrap) -> Training:
    """Two linear layers, the first cut by columns, the second by rows, their all-reduce inside of the region."""
    blocks = [nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.Tanh(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(2)]
    mesh = init_device_mesh("cpu", (PROCESSES,))
    for block in blocks:
        parallelize_module(block, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return trains(Stack(list(blocks), wrap), same=True)


# -- the table ---------------------------------------------------------------------------------------------------------

_BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

CASES: dict[str, Case] = {
    "ddp": Case(ddp, 9, 9),
    "ddp, checkpoint inside the block": Case(partial(ddp, where="inside"), 9, 9),
    "ddp, static graph": Case(partial(ddp, static_graph=True), 9, 9),
    "ddp, gradients as views": Case(partial(ddp, gradient_as_bucket_view=True), 9, 9),
    "ddp, unused parameters": Case(ddp_unused, 7, 7),
    "ddp, module used twice": Case(ddp_twice, 9, 9),
    "ddp, module used twice, static graph": Case(partial(ddp_twice, static_graph=True), 9, 9),
    "ddp, module used twice, unused parameters": Case(partial(ddp_twice, find_unused_parameters=True), 9, 9),
    "ddp, gradient accumulation": Case(ddp_accumulates, 18, 24),
    "ddp, microbatches": Case(ddp_microbatches, 18, 18),
    "ddp, whole model": Case(whole_ddp, 3, 3),
    "ddp, whole model, static graph": Case(partial(whole_ddp, static_graph=True), 3, 3),
    "ddp, whole model, unused parameters": Case(partial(whole_ddp, find_unused_parameters=True), 3, 3),
    "ddp, checkpoint_wrapper": Case(wrapped_in_ddp, 9, 9, around=reactivate.dropin.install),
    "SyncBatchNorm": Case(sync_norm, 6, 6, collectives_of_a_recomputation=["all_reduce"]),
    "SyncBatchNorm, no early stop": Case(
        sync_norm, 6, 6, early_stop=False, collectives_of_a_recomputation=["all_reduce"]
    ),
    "all-to-all": Case(experts, 6, 6, collectives_of_a_recomputation=["all_to_all"] * 2),
    "all-to-all, no early stop": Case(
        experts, 6, 6, early_stop=False, collectives_of_a_recomputation=["all_to_all"] * 2
    ),
    "collective at the end": Case(collective_at_the_end, 3, 3, check="metadata", collectives_of_a_recomputation=[]),
    "collective at the end, no early stop": Case(
        collective_at_the_end, 3, 3, early_stop=False, collectives_of_a_recomputation=["all_reduce"]
    ),
    "processes need different outputs, no early stop": Case(
        other_needs, 3, 3, early_stop=False, collectives_of_a_recomputation=["all_reduce"]
    ),
    "tensor parallel": Case(tensor_parallel, 6, 6),
    "policy, ddp": Case(applied_in_ddp, 9, 9),
    "policy, ddp, static graph": Case(partial(applied_in_ddp, static_graph=True), 9, 9),
    "policy, around ddp": Case(applied_around_ddp, 9, 9),
    "policy, then fsdp": Case(partial(applied_and_sharded, first=True), 9, 9),
    "fsdp, then policy": Case(partial(applied_and_sharded, first=False), 9, 9),
    "policy, then fsdp, bfloat16": Case(partial(applied_and_sharded, first=True, mp_policy=_BF16), 9, 9),
    "fsdp, whole model": Case(whole_sharded, 3, 3),
    "fsdp, microbatches": Case(sharded_microbatches, 18, 18),
}
for _place in PLACES:
    for _reshard in (True, False):
        _name = f"fsdp, {_place}, " + ("resharded" if _reshard else "kept")
        CASES[_name] = Case(partial(sharded, place=_place, reshard_after_forward=_reshard), 9, 9)
    CASES[f"fsdp, {_place}, bfloat16"] = Case(partial(sharded, place=_place, mp_policy=_BF16), 9, 9)
for _composable in (True, False):
    for _reshard in (True, False):
        _name = f"fsdp, {'composable checkpoint' if _composable else 'checkpoint_wrapper'}, "
        _make = partial(wrapped_and_sharded, composable=_composable, reshard_after_forward=_reshard)
        _name += "resharded" if _reshard else "kept"
        CASES[_name] = Case(_make, 9, 9, around=reactivate.dropin.install)

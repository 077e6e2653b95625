"""The programs of `test_process_groups`: trained on several processes, plain, with torch's checkpoint and with this package.

Each takes a way to make a region, and returns what there is to compare by name. What it counts goes to `counted`.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from journal import Journal
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.experimental import context_parallel as patched_attention
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

import reactivate
from reactivate import policies

WIDTH, STEPS = 16, 2
TIMEOUT_SECONDS = 8  # of the process groups of failures

Wrap = Callable[[Any], Callable[..., Any]]
Found = dict[str, Any]


def plain(fn: Any) -> Any:
    return fn


def torchs(fn: Any) -> Any:
    return partial(torch.utils.checkpoint.checkpoint, fn, use_reentrant=False)


def ours(fn: Any) -> Any:
    return reactivate.checkpoint(fn)


def saving_collectives(fn: Any) -> Any:
    return reactivate.checkpoint(fn, policy=policies.save("collectives"))


class Collectives(TorchDispatchMode):
    """Counts collectives by the names of their ops, those in recomputations also under "recomputed"."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # a sharded tensor runs the op on its part, and collectives around it
        is_collective = func.namespace in ("c10d", "_c10d_functional", "_dtensor")
        if is_collective and func.__name__.strip("_")[0] != "w":  # no wait, no wrap
            name = func.__name__.partition(".")[0].strip("_")
            self.counts[name] += 1
            if reactivate.is_recomputing():
                self.counts["recomputed"] += 1
        return func(*args, **(kwargs or {}))


def data(step: int, *, same: bool = False, shape: tuple[int, ...] = (8, WIDTH)) -> Tensor:
    seed = 1000 + step + (0 if same else 100 * (1 + dist.get_rank()))
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def local(value: Any) -> Any:
    return value.to_local() if isinstance(value, DTensor) else value


def trained(model: nn.Module, forward: Callable[[int], Tensor]) -> Found:
    """Train the model: losses, gradients and parameters, as this process has them."""
    found: Found = {}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Collectives() as collectives:
        for step in range(STEPS):
            loss = forward(step)
            loss.backward()
            found[f"loss {step}"] = local(loss.detach())
            for name, parameter in model.named_parameters():
                gradient = parameter.grad
                found[f"gradient of {name}, step {step}"] = None if gradient is None else local(gradient).clone()
            optimizer.step()
            optimizer.zero_grad()
    found |= {f"parameter {name}": local(value.detach()).clone() for name, value in model.named_parameters()}
    found["collectives"] = dict(collectives.counts)
    return found


class Block(nn.Module):
    def __init__(self, inside: Wrap = plain) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.inside = inside

    def body(self, x: Tensor) -> Tensor:
        return x + nn.functional.dropout(self.down(torch.tanh(self.up(self.norm(x)).sin())), 0.2)

    def forward(self, x: Tensor) -> Tensor:
        return self.inside(self.body)(x)  # type: ignore[no-any-return]


class Stack(nn.Module):
    def __init__(self, blocks: list[nn.Module], wrap: Wrap = plain) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.wrap = wrap

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.wrap(block)(x)
        return x


# -- fully_shard -------------------------------------------------------------------------------------------------------


def sharded(wrap: Wrap, *, place: str, is_low: bool = False, reshards: bool = True) -> Found:
    """Regions inside of units, units that are regions, and units inside of a region: its parts, and several of them."""
    blocks: list[nn.Module] = [Block(wrap if place == "inside" else plain) for _ in range(2)]
    model = Stack(blocks, wrap if place in ("block", "parts") else plain)
    options: dict[str, Any] = {"reshard_after_forward": reshards}
    if is_low:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in blocks:
        if place == "parts":
            assert isinstance(block, Block)
            fully_shard(block.up, **options)
            fully_shard(block.down, **options)
        fully_shard(block, **options)
    fully_shard(model, **options)
    call = wrap(lambda x: model(x)) if place == "around" else model

    def forward(step: int) -> Tensor:
        return call(data(step)).float().square().mean()  # type: ignore[no-any-return]

    found = trained(model, forward)
    found["sharded again"] = all(isinstance(parameter, DTensor) for parameter in model.parameters())
    return found


def flattened(wrap: Wrap, *, place: str, is_original: bool) -> Found:
    """Units of `FullyShardedDataParallel`, which flattens parameters, around regions, as regions, and inside of them."""
    unit = partial(FullyShardedDataParallel, use_orig_params=is_original, device_id=torch.device("cpu"))
    blocks = [unit(Block(wrap if place == "inside" else plain)) for _ in range(2)]
    model = unit(Stack(blocks, wrap if place == "block" else plain))
    call = wrap(lambda x: model(x)) if place == "around" else model

    def forward(step: int) -> Tensor:
        return call(data(step)).square().mean()  # type: ignore[no-any-return]

    found = trained(model, forward)
    found["sharded again"] = all(parameter.ndim == 1 for parameter in model.parameters())
    return found


# -- tensor and sequence parallelism -----------------------------------------------------------------------------------


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.mix(torch.tanh(self.up(self.norm(x)).sin())))  # type: ignore[no-any-return]

    def mix(self, h: Tensor) -> Tensor:
        return h


class Remembering(Mlp):
    """Each call stores a sharded tensor, and reads that of the call before."""

    last: Tensor

    def mix(self, h: Tensor) -> Tensor:
        before, self.last = self.last, h
        return h * before.detach().exp()


def tensor_parallel(wrap: Wrap) -> Found:
    """The inputs of the regions are sharded tensors."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = Stack([Remembering() for _ in range(2)], wrap)
    for block in model.blocks:
        plan = {
            "norm": SequenceParallel(sequence_dim=0, use_local_output=False),
            "up": ColwiseParallel(input_layouts=Shard(0), use_local_output=False),
            "down": RowwiseParallel(output_layouts=Shard(0), use_local_output=False),
        }
        parallelize_module(block, mesh, plan)
        block.last = distribute_tensor(torch.zeros(8, 4 * WIDTH), mesh, [Shard(1)])

    def forward(step: int) -> Tensor:
        x = distribute_tensor(data(step, same=True), mesh, [Shard(0)])
        out = model(x)
        assert isinstance(out, DTensor) and out.placements == (Shard(0),)
        return out.square().mean().full_tensor()  # type: ignore[no-any-return]

    found = trained(model, forward)
    return found | {f"last of {index}": local(block.last.detach()) for index, block in enumerate(model.blocks)}


def sequence_parallel(wrap: Wrap) -> Found:
    """Each process has a part of the sequence between the blocks; the tensors there are plain ones."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = Stack([Mlp() for _ in range(2)], wrap)
    for block in model.blocks:
        plan = {
            "norm": SequenceParallel(use_local_output=False),
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(output_layouts=Shard(1)),
        }
        parallelize_module(block, mesh, plan)

    def forward(step: int) -> Tensor:
        return model(data(step, shape=(2, 4, WIDTH))).square().mean()  # type: ignore[no-any-return]

    return trained(model, forward)


# -- context parallelism -----------------------------------------------------------------------------------------------


# torch 2.14 has another name for it.
_gather = getattr(functional, "all_gather_single_autograd", None) or functional.all_gather_tensor_autograd


def gathered(tensor: Tensor) -> Tensor:
    return _gather(tensor, 2, dist.group.WORLD)  # type: ignore[no-any-return]


class Attention(nn.Module):
    """Attention of this process' queries to the keys and values of all processes."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).view(2, -1, 2, 3 * WIDTH // 2).transpose(1, 2).chunk(3, dim=-1)
        key, value = gathered(key.contiguous()), gathered(value.contiguous())
        kernels.append((reactivate.is_recomputing(), torch.backends.cuda.flash_sdp_enabled()))
        out = nn.functional.scaled_dot_product_attention(query, key, value)
        return x + out.transpose(1, 2).reshape(x.shape)


kernels = Journal()  # (in a recomputation?, is the flash kernel allowed?) of each call


def context_parallel(wrap: Wrap) -> Found:
    """The choice of a kernel for attention is around the forward alone, as `context_parallel` has it."""
    model = Stack([Attention() for _ in range(2)], wrap)
    kernels.clear()

    def forward(step: int) -> Tensor:
        with sdpa_kernel([SDPBackend.MATH]):
            return model(data(step, shape=(2, 4, WIDTH))).square().mean()  # type: ignore[no-any-return]

    found = trained(model, forward)
    found["flash"] = sorted({*kernels})
    return found


class LocalAttention(nn.Module):
    """Attention of this process' part of a sequence, which `context_parallel` makes one to the whole sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).unflatten(-1, (2, -1)).transpose(1, 2).chunk(3, dim=-1)
        kernels.append((reactivate.is_recomputing(), torch.backends.cuda.flash_sdp_enabled()))
        out = nn.functional.scaled_dot_product_attention(query, key, value)
        return x + nn.functional.dropout(out.transpose(1, 2).reshape(x.shape), 0.2)


def torchs_context_parallel(wrap: Wrap, *, is_backward_inside: bool = True) -> Found:
    """The choice of a kernel is around the forward alone, `context_parallel`, which patches attention, around both passes.

    Of a CPU's kernels it takes the one that is made of several ops (MATH), without a mask; with another it does not end.
    """
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = Stack([LocalAttention() for _ in range(2)], wrap)
    kernels.clear()
    contexts = ExitStack()

    def forward(step: int) -> Tensor:
        contexts.close()
        x = data(step, same=True, shape=(2, 4 * dist.get_world_size(), WIDTH))
        contexts.enter_context(patched_attention(mesh, buffers=[x], buffer_seq_dims=[1], no_restore_buffers={x}))
        with sdpa_kernel([SDPBackend.MATH]):
            loss = model(x).square().mean()
        if not is_backward_inside:
            contexts.close()
        return loss  # type: ignore[no-any-return]

    with contexts:
        found = trained(model, forward)
    found["flash"] = sorted({*kernels})
    return found


# -- expert parallelism ------------------------------------------------------------------------------------------------


class Experts(nn.Module):
    """Rows go to the process of their expert and come back; how many go where differs."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.expert = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        size, rank = dist.get_world_size(), dist.get_rank()
        table = [[1 + (source + target) % size for target in range(size)] for source in range(size)]
        sent, received = table[rank], [row[rank] for row in table]
        rows = torch.tanh(self.gate(x))[: sum(sent)]
        there = functional.all_to_all_single_autograd(rows, received, sent, dist.group.WORLD)
        done = torch.sin(self.expert(there).exp())
        back = functional.all_to_all_single_autograd(done, sent, received, dist.group.WORLD)
        return torch.cat([back.exp().sin(), x[sum(sent) :]])


def experts(wrap: Wrap) -> Found:
    model = Stack([Experts() for _ in range(2)], wrap)

    def forward(step: int) -> Tensor:
        return model(data(step, shape=(16, WIDTH))).square().mean()  # type: ignore[no-any-return]

    return trained(model, forward)


PATCHED = "context parallel, of torch"
PROGRAMS: dict[str, Callable[[Wrap], Found]] = {
    **{f"fsdp, {place}": partial(sharded, place=place) for place in ("inside", "block", "parts", "around")},
    **{f"fsdp, {place}, kept": partial(sharded, place=place, reshards=False) for place in ("inside", "parts")},
    **{f"fsdp, {place}, bfloat16": partial(sharded, place=place, is_low=True) for place in ("block", "parts")},
    **{
        f"fsdp, flat, {place}{', original' * is_original}": partial(flattened, place=place, is_original=is_original)
        for place in ("inside", "block", "around")
        for is_original in (False, True)
    },
    "tensor parallel": tensor_parallel,
    "sequence parallel": sequence_parallel,
    "context parallel": context_parallel,
    PATCHED: torchs_context_parallel,
    "experts": experts,
}
WAYS: dict[str, Wrap] = {"plain": plain, "torch": torchs, "ours": ours, "saving": saving_collectives}


def ways_of(name: str) -> list[str]:
    """Return the ways in which a program runs: no policy sees the collectives of `fully_shard` and of pipelines.

    Nor those that attention on sharded tensors makes of itself; there torch's checkpoint, which loses the choice of a kernel,
    does not end.
    """
    if name == PATCHED:
        return ["plain", "ours"]
    return [way for way in WAYS if way != "saving" or not name.startswith(("fsdp", "pipeline"))]


# -- failures ----------------------------------------------------------------------------------------------------------


def _summed(x: Tensor) -> Tensor:
    return functional.all_reduce(x.sin(), "sum", dist.group.WORLD).exp()


def killed() -> None:
    """The last process dies in its recomputation, before a collective."""

    def fn(x: Tensor) -> Tensor:
        if reactivate.is_recomputing() and dist.get_rank() == dist.get_world_size() - 1:
            os._exit(3)
        return (x * _summed(x.detach())).sin()

    reactivate.checkpoint(fn)(data(0).requires_grad_()).sum().backward()
    dist.barrier()


def slow() -> None:
    """The last process comes to its recomputation's collective when the others wait no longer."""

    def fn(x: Tensor) -> Tensor:
        if reactivate.is_recomputing() and dist.get_rank() == dist.get_world_size() - 1:
            time.sleep(1.5 * TIMEOUT_SECONDS)
        return (x * _summed(x.detach())).sin()

    reactivate.checkpoint(fn)(data(0).requires_grad_()).sum().backward()
    dist.barrier()


def other_policy() -> None:
    """One process keeps the result of the collective, the others run it again."""
    wrap = saving_collectives if dist.get_rank() == 0 else ours
    wrap(lambda x: (x * _summed(x.detach())).sin())(data(0).requires_grad_()).sum().backward()
    dist.barrier()


def other_shape() -> None:
    """One process has other data in its recomputation."""

    def fn(x: Tensor) -> Tensor:
        rows = 4 if reactivate.is_recomputing() and dist.get_rank() == 0 else 8
        return (x[:rows] * _summed(x.detach()[:rows])).sin().sum()

    reactivate.checkpoint(fn)(data(0).requires_grad_()).backward()
    dist.barrier()


def other_collective() -> None:
    """One process runs another collective of the same size in its recomputation, which a group that compares them tells."""
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    group = dist.new_group()

    def fn(x: Tensor) -> Tensor:
        seen = x.detach().sin()
        if reactivate.is_recomputing() and dist.get_rank() == 0:
            dist.all_gather([torch.empty_like(seen) for _ in range(dist.get_world_size())], seen, group=group)
        else:
            dist.all_reduce(seen, group=group)
        return (x * seen).sin()

    reactivate.checkpoint(fn)(data(0).requires_grad_()).sum().backward()


def patched_no_longer() -> None:
    """The backward is outside of `context_parallel`: the recomputation calls attention that is not patched any more."""
    torchs_context_parallel(ours, is_backward_inside=False)


FAILURES: dict[str, Callable[[], None]] = {
    "killed": killed,
    "slow": slow,
    "other policy": other_policy,
    "other shape": other_shape,
    "other collective": other_collective,
    "patched no longer": patched_no_longer,
}

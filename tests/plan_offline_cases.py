"""Plans that one process makes of a rank of many, beside what that rank takes. `ranks` runs them."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from memory import OfRank, allocated_by_rank
from plan_models import GPT
from ranks import TIMEOUT, Cases, case
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F
from torch.testing._internal.distributed.fake_pg import FakeStore

import reactivate
from reactivate.errors import PlanInfeasible
from reactivate.planner.plan import Plan

CASES: Cases = {}
LOWER = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
STEPS = 24  # of which one lets go of all in time, and the first mostly does

_FILE = Path(__file__).parent.parent / "examples" / "sharded_llama.py"
_SPEC = importlib.util.spec_from_file_location("sharded_llama", _FILE)
assert _SPEC is not None and _SPEC.loader is not None
llama: Any = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(llama)


@contextmanager
def alone(directory: Path) -> Iterator[None]:
    """Be this rank of a process group whose other ranks are not there; then of the real one again."""
    rank, world = dist.get_rank(), dist.get_world_size()
    dist.barrier()  # the others may still be connecting
    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()
        store = dist.FileStore(str(directory / f"again-{next(_NUMBERS)}"), world)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=TIMEOUT)


_NUMBERS = itertools.count()


def small_llama(layers: int = 2) -> Any:
    torch.manual_seed(0)
    return llama.Llama(layers, width=128, heads=4, shared_heads=4, hidden=256, vocabulary=512)


class Labelled(GPT):
    """A GPT that returns its loss."""

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(super().forward(tokens).flatten(0, 1), labels.flatten())


def small_gpt() -> Labelled:
    torch.manual_seed(0)
    return Labelled(dim=96, layers=2)


def batch() -> tuple[Tensor, Tensor]:
    return torch.zeros(2, 64, dtype=torch.long), torch.zeros(2, 64, dtype=torch.long)


def plans(make: Callable[[], nn.Module]) -> list[Plan]:
    """Return plans of this rank that one process makes: of the plain step, the smallest, and one halfway between them."""
    with torch.device("meta"):
        model = make()
        inputs = batch()
    plain = reactivate.plan(model, inputs, budget="100%", device="cpu")
    assert plain.made_for.is_predicted and plain.proof.method == "simulated"
    with pytest.raises(PlanInfeasible) as found:
        plain.at(plain.fixed.total + 1)
    least_bytes = found.value.least_bytes
    return [plain, plain.at((plain.plain.peak_bytes + least_bytes) // 2), plain.at(least_bytes)]


def assert_equal_to_a_rank(directory: Path, make: Callable[[], nn.Module]) -> list[Plan]:
    """Plan this rank in one process, and run it among the others: its peak is that of the plan, to the byte.

    Three things are no part of a plan for a GPU, and a real step on gloo has them. gloo copies what it reduces, and
    allocates in its threads: `allocated_by_rank` tells these bytes apart. A thread of gloo may still hold a tensor of a
    collective that is done when the step goes on, now and then: so the least of several steps counts. oneDNN takes memory
    for itself in products of bfloat16: it is switched off.
    """
    with alone(directory):
        planned = plans(make)
    with torch.backends.mkldnn.flags(enabled=False):
        for plan in planned:
            model, inputs = make(), batch()
            reactivate.apply(model, plan)
            largest = max(sum(4 * item.numel() for item in part.parameters()) for part in (model, *model.blocks))

            def step() -> None:
                loss = model(*inputs)
                loss.backward()

            step()
            assert gradient_bytes(model) == plan.fixed.gradients
            promised = plan.predicted.peak_bytes - plan.fixed.total
            found = []
            while len(found) < STEPS and not is_seen_by_all(found, promised):
                found.append(allocated_by_rank(step))
            assert min(item.own_bytes for item in found) == promised, (found, promised)
            assert all(item.peak_bytes <= promised + 2 * largest for item in found), (found, promised, largest)
    assert planned[0].predicted.peak_bytes > planned[-1].predicted.peak_bytes
    return planned


def is_seen_by_all(found: list[OfRank], promised: int) -> bool:
    """Return whether each rank has taken a step with just the promised peak: all take as many."""
    is_seen = torch.tensor(int(any(item.own_bytes == promised for item in found)))
    dist.all_reduce(is_seen, dist.ReduceOp.MIN)
    return bool(is_seen)


def gradient_bytes(model: nn.Module) -> int:
    """Return the memory of all gradients on this rank, each once."""
    found = [getattr(item.grad, "_local_tensor", item.grad).untyped_storage() for item in model.parameters()]
    return sum({storage._cdata: storage.nbytes() for storage in found}.values())


def sharded(
    make: Callable[[], Any],
    *dimensions: int,
    parts: Callable[[Any], list[nn.Module]] = lambda block: [],
    **options: Any,
) -> Callable[[], nn.Module]:
    def made() -> nn.Module:
        model = make()
        names = ("replicas", "shards")[-len(dimensions) :] if dimensions else ("shards",)
        mesh = init_device_mesh("cpu", dimensions or (dist.get_world_size(),), mesh_dim_names=names)
        for block in model.blocks:
            for part in parts(block):
                fully_shard(part, mesh=mesh, **options)
        return llama.shard(model, mesh, **options)

    return made


@case(CASES, 4)
def parameters_that_are_sharded_again(directory: Path) -> None:
    for make in (small_llama, small_gpt):
        assert_equal_to_a_rank(directory, sharded(make))


@case(CASES, 2)
def parameters_that_stay_gathered(directory: Path) -> None:
    assert_equal_to_a_rank(directory, sharded(small_llama, reshard_after_forward=False))


@case(CASES, 2)
def mixed_precision(directory: Path) -> None:
    assert_equal_to_a_rank(directory, sharded(small_gpt, mp_policy=LOWER))


@case(CASES, 2)
def mixed_precision_that_stays_gathered(directory: Path) -> None:
    assert_equal_to_a_rank(directory, sharded(small_llama, mp_policy=LOWER, reshard_after_forward=False))


@case(CASES, 2)
def units_inside_of_blocks(directory: Path) -> None:
    assert_equal_to_a_rank(directory, sharded(small_gpt, parts=lambda block: [block.attn, block.mlp]))


@case(CASES, 2)
def tensor_parallelism(directory: Path) -> None:
    def made() -> Any:
        return llama.parallelize(small_llama(), init_device_mesh("cpu", (dist.get_world_size(),)))

    assert_equal_to_a_rank(directory, made)


@case(CASES, 2)
def shards_of_unequal_size(directory: Path) -> None:
    def made() -> Any:
        return llama.Llama(2, width=60, heads=4, shared_heads=1, hidden=133, vocabulary=251)

    assert_equal_to_a_rank(directory, sharded(made))


@case(CASES, 4)
def replicas_of_shards(directory: Path) -> None:
    assert_equal_to_a_rank(directory, sharded(small_llama, 2, 2))


@case(CASES, 4)
def shards_of_tensor_parallel_models(directory: Path) -> None:
    def made() -> Any:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        return llama.shard(llama.parallelize(small_llama(), mesh["tp"]), mesh["dp"], mp_policy=LOWER)

    assert_equal_to_a_rank(directory, made)

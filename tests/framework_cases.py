"""The cases of `test_dropin_megatron` and `test_dropin_deepspeed` that run on several ranks."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from oracle import Ran, assert_bitwise
from ranks import Cases, case
from torch import Tensor, nn

import reactivate
from reactivate._passes.observing import observed_by
from reactivate.dropin import deepspeed, megatron
from reactivate.errors import StorageError
from reactivate.guards import RngTracker, tensor_parallel_seeds
from reactivate.storage import Host, Sharded

CASES: Cases = {}
SEED, WIDTH, ROWS, LAYERS = 1234, 6, 5, 3


class _Summed(torch.autograd.Function):
    """The sum over ranks, whose gradient is passed on: the end of a tensor-parallel layer."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class _Copied(torch.autograd.Function):
    """Its beginning: the gradient is the sum over ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient


class Layer(nn.Module):
    """A tensor-parallel feed-forward layer: each rank has its columns and dropout of its own, and a shared one behind."""

    def __init__(self, tracker: RngTracker, number: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(100 * number + dist.get_rank())
        self.up = nn.Parameter(torch.randn(4, WIDTH, generator=generator))
        self.down = nn.Parameter(torch.randn(WIDTH, 4, generator=generator))
        self.tracker = tracker

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        h = F.linear(_Copied.apply(x), self.up).sin()  # type: ignore[no-untyped-call]
        with self.tracker.fork():
            h = F.dropout(h, 0.3)
        y = _Summed.apply(F.linear(h, self.down))  # type: ignore[no-untyped-call]
        return x + F.dropout(y if scale is None else y * scale, 0.2)


def trained(call: Callable[..., Any], checked: Callable[[], None] = lambda: None) -> tuple[Ran, dict[str, Any]]:
    torch.manual_seed(SEED)
    tracker = RngTracker()
    for name, seed in tensor_parallel_seeds(SEED, dist.get_rank()).items():
        tracker.add(name, seed)
    first = nn.Linear(WIDTH, WIDTH)
    layers = [Layer(tracker, number) for number in range(LAYERS)]
    x, scale = torch.randn(ROWS, WIDTH), torch.randn(WIDTH, requires_grad=True)
    with observed_by(ran := Ran()):
        y = first(x)
        kept = []
        for layer in layers:
            kept.append(y.detach())
            y = call(layer, y, scale)
        checked()
        assert [item.shape for item in kept] == [(ROWS, WIDTH)] * LAYERS
        y.square().sum().backward()
    found: dict[str, Any] = {"scale": scale.grad, "first": first.weight.grad, "default": torch.rand(3)}
    for number, layer in enumerate(layers):
        found |= {f"up {number}": layer.up.grad, f"down {number}": layer.down.grad}
    with tracker.fork():
        found["model-parallel"] = torch.rand(3)
    return ran, found


def assert_trains_as_plain(call: Callable[..., Any], checked: Callable[[], None] = lambda: None) -> None:
    _, expected = trained(lambda layer, *args: layer(*args))
    ran, found = trained(call, checked)
    assert (ran.regions, ran.recomputations) == (LAYERS, LAYERS)
    for name, value in expected.items():
        assert_bitwise(value, found[name], name)


def part() -> int:
    return -(-ROWS * WIDTH * 4 // dist.get_world_size())


@case(CASES, 2, 4)
def megatron_distributes_the_first_argument() -> None:
    storage = Sharded(least_bytes=0)

    def checked() -> None:
        assert storage.used_bytes == LAYERS * part()

    with megatron.parallel(group=dist.group.WORLD):
        assert_trains_as_plain(lambda layer, *args: megatron.checkpoint(layer, True, *args), checked)
        assert_trains_as_plain(lambda layer, *args: megatron.checkpoint(layer, False, *args))
    assert storage.traffic.moved == LAYERS


@case(CASES, 2)
def megatron_leaves_the_other_arguments() -> None:
    """The second one is another one on each rank."""
    with megatron.parallel(group=dist.group.WORLD):
        x, own = torch.ones(4, requires_grad=True), torch.full((4,), float(dist.get_rank()), requires_grad=True)
        megatron.checkpoint(lambda x, own: (x * own).sin(), True, x * 2, own * 2).sum().backward()
        with pytest.raises(StorageError, match=r"args\[0\].*not the same on its 2 ranks"):
            megatron.checkpoint(lambda x, own: (x * own).sin(), True, own * 2, x * 2).sum().backward()


@case(CASES, 2)
def megatron_policy_with_distributed_inputs() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model, x = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False), torch.randn(2, 3, 8)

    def gradients() -> list[Tensor]:
        torch.manual_seed(1)
        model.zero_grad()
        model(x).sum().backward()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    plain = gradients()
    with megatron.parallel(group=dist.group.WORLD):
        policy = megatron.policy(
            recompute_granularity="full",
            recompute_method="block",
            recompute_num_layers=3,
            distribute_saved_activations=True,
        )
    handle = reactivate.apply(model, policy)
    assert handle.regions == ("layers.0", "layers.1", "layers.2")
    before = Sharded(least_bytes=0).traffic.moved
    for one, other in zip(plain, gradients(), strict=True):
        assert_bitwise(one, other, "gradient")
    assert Sharded(least_bytes=0).traffic.moved == before + 2  # the first block is called with a leaf


def mpu() -> Any:
    return SimpleNamespace(get_model_parallel_group=lambda: dist.group.WORLD)


@case(CASES, 2, 4)
def deepspeed_partitions() -> None:
    deepspeed.configure(mpu(), partition_activations=True)
    storage = Sharded(least_bytes=0)

    def checked() -> None:
        assert storage.used_bytes == LAYERS * part()

    for function in (deepspeed.checkpoint, deepspeed.non_reentrant_checkpoint):
        assert_trains_as_plain(function, checked)
    assert storage.traffic.moved == 2 * LAYERS


@case(CASES, 2)
def deepspeed_partitions_in_the_memory_of_the_host() -> None:
    deepspeed.configure(mpu(), {"activation_checkpointing": {"partition_activations": True, "cpu_checkpointing": True}})
    storage = Sharded(storage=Host(least_bytes=0), least_bytes=0)
    assert deepspeed.settings.storage() == storage
    assert_trains_as_plain(deepspeed.checkpoint)
    assert storage.traffic.moved == LAYERS
    deepspeed.configure(None, checkpoint_in_cpu=True)  # keeps the group, and switches the rest off
    assert deepspeed.settings.group is dist.group.WORLD
    assert deepspeed.settings.storage() == Host(least_bytes=0)


@case(CASES, 2)
def deepspeed_refuses_what_ranks_do_not_share() -> None:
    """DeepSpeed splits it, and trains on the parts of other sequences."""
    deepspeed.configure(mpu(), partition_activations=True)
    own = torch.full((4,), float(dist.get_rank()), requires_grad=True) * 2
    with pytest.raises(StorageError, match=r"args\[0\].*not the same on its 2 ranks"):
        deepspeed.checkpoint(torch.sin, own)
    own.no_checkpointing = True  # type: ignore[attr-defined]
    deepspeed.checkpoint(lambda x: x.sin().exp(), own).sum().backward()

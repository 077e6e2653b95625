"""Policies of torch's selective checkpointing that offload, on a simulated device. `test_simulated` runs this file."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import simulated
import torch
import torch.utils.checkpoint as upstream
from torch import Tensor
from torch.autograd.graph import save_on_cpu

from reactivate.dropin import torch as ours
from reactivate.storage import Host

Policy = upstream.CheckpointPolicy
SIZE = 32
SCHEDULES = [("late", 0), ("early", 0), *(("random", seed) for seed in range(6))]
every_schedule = pytest.mark.parametrize(("schedule", "seed"), SCHEDULES, ids=str)


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    found = Host(least_bytes=0)
    monkeypatch.setattr(ours, "storage", found)
    return found


def region(x: Tensor, weight: Tensor) -> Tensor:
    for _ in range(3):
        x = (x @ weight).tanh()
    return x


def contexts(answer: Any) -> Any:
    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        return answer if op is torch.ops.aten.mm.default else Policy.PREFER_RECOMPUTE

    return functools.partial(upstream.create_selective_checkpoint_contexts, policy)


def stepped(device: Any, answer: Any, steps: int = 2, around: Any = None) -> tuple[list[Tensor], list[int]]:
    """Return the gradients of some steps, on the CPU, and the bytes on the device between forward and backward."""
    numbers = torch.Generator().manual_seed(0)
    weights = [torch.randn(SIZE, SIZE, generator=numbers).to(device).requires_grad_() for _ in range(4)]
    gradients, held = [], []
    for _ in range(steps):
        out = torch.randn(SIZE, SIZE, generator=numbers).to(device)
        for weight in weights:
            inner = functools.partial(
                ours.checkpoint,
                region,
                use_reentrant=False,
                respect_saved_tensors_hooks=True,
                context_fn=contexts(answer),
            )
            if around is None:
                out = inner(out, weight)
            else:
                with around():
                    out = inner(out, weight)
        if device.type != "cpu":
            held.append(simulated.memory_allocated())
        gradients += torch.autograd.grad(out.sum(), weights)
        del out
    return [gradient.cpu() for gradient in gradients], held


@every_schedule
@pytest.mark.parametrize("name", ["MUST_CPU_OFFLOAD", "PREFER_CPU_OFFLOAD"])
def test_bits_and_bytes(name: str, schedule: str, seed: int, host: Host) -> None:
    """Products are on the host between forward and backward, all but the last ones, and not computed again."""
    expected, _ = stepped(torch.device("cpu"), Policy.MUST_RECOMPUTE)
    with simulated.accelerator(schedule, seed) as device:
        found, offloaded = stepped(device, getattr(Policy, name))
        moved, products = host.traffic.moved, products_run()
        saved_bits, saved = stepped(device, Policy.MUST_SAVE)
        _, recomputed = stepped(device, Policy.MUST_RECOMPUTE)
    assert all(map(torch.equal, found, expected)) and all(map(torch.equal, saved_bits, expected))
    result = SIZE * SIZE * 4
    assert moved == 2 * 11 and host.traffic.loaded_bytes > 0
    assert products == 2 * (12 * 3 - 1), "one in the forward, two in the backward; the batch needs no gradient"
    for one, other, least in zip(saved, offloaded, recomputed):
        # The last two wait on the device. The self-check of the first steps keeps sums there, less than one result.
        assert one - other > 9 * result
        assert other - least < 3 * result


def products_run() -> int:
    return sum(entry.name == "aten::mm" for entry in simulated.log())


@every_schedule
@pytest.mark.parametrize("name", ["MUST_CPU_OFFLOAD", "MUST_SAVE"])
def test_save_on_cpu_around_the_region(name: str, schedule: str, seed: int, host: Host) -> None:
    expected, _ = stepped(torch.device("cpu"), Policy.MUST_RECOMPUTE)
    with simulated.accelerator(schedule, seed) as device:
        found, held = stepped(device, getattr(Policy, name), around=save_on_cpu)
        _, plain = stepped(device, Policy.MUST_SAVE)
    assert all(map(torch.equal, found, expected))
    assert host.traffic.moved == (22 if name == "MUST_CPU_OFFLOAD" else 0)
    assert all(one - other >= 3 * SIZE * SIZE * 4 for one, other in zip(plain, held)), "what the hooks have moved"


@every_schedule
def test_save_on_cpu_inside_of_the_region(schedule: str, seed: int, host: Host) -> None:
    def inside(x: Tensor, weight: Tensor) -> Tensor:
        x = (x @ weight).tanh()
        with save_on_cpu(pin_memory=True):
            x = (x @ weight).tanh()
        return (x @ weight).tanh()

    expected, _ = stepped(torch.device("cpu"), Policy.MUST_RECOMPUTE, steps=1)
    numbers = torch.Generator().manual_seed(0)
    with simulated.accelerator(schedule, seed) as device:
        weights = [torch.randn(SIZE, SIZE, generator=numbers).to(device).requires_grad_() for _ in range(4)]
        out = torch.randn(SIZE, SIZE, generator=numbers).to(device)
        for weight in weights:
            out = ours.checkpoint(
                inside, out, weight, use_reentrant=False, context_fn=contexts(Policy.MUST_CPU_OFFLOAD)
            )
        found = [gradient.cpu() for gradient in torch.autograd.grad(out.sum(), weights)]
    assert all(map(torch.equal, found, expected))
    assert host.traffic.moved == 11

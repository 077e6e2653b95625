"""The host as a storage for tensors of a GPU. Not run where there is none."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from oracle import assert_bitwise
from residual import Residual
from test_gpu_training import DEVICE, Layer
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import reactivate
from reactivate import policies
from reactivate.storage import Host

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not getattr(torch, DEVICE).is_available(), reason="needs CUDA: not run"),
]
DEPTH, WIDTH, LENGTH, BATCH = 8, 128, 512, 8
INPUT = BATCH * LENGTH * WIDTH * 4  # bytes


def a_model() -> nn.Module:
    return Residual(WIDTH, DEPTH, Layer).to(DEVICE)


def trained(model: nn.Module, steps: int = 4) -> list[Tensor]:
    torch.manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters())
    seen = []
    for _ in range(steps):
        loss = model(torch.randn(BATCH, LENGTH, WIDTH, device=DEVICE)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.detach())
    return [*seen, *(parameter.detach() for parameter in model.parameters())]


@pytest.mark.parametrize(
    "policy",
    [
        lambda host: policies.full(inputs=host),
        lambda host: policies.first_match(policies.save_ops("linear", storage=host), policies.full()),
        lambda host: policies.first_match(policies.save_ops("linear", storage=host), policies.full(inputs=host)),
    ],
)
@pytest.mark.parametrize(("last", "ahead"), [(1, 1), (0, 0), (2, 3)])
def test_training_is_bitwise_the_plain_models(policy: Any, last: int, ahead: int) -> None:
    torch.manual_seed(1)
    plain = a_model()
    model = copy.deepcopy(plain)
    host = Host(least_bytes=0, last=last, ahead=ahead)
    reactivate.apply(model, policy(host))
    with sdpa_kernel(SDPBackend.MATH):  # the others add up in any order when they go backward
        found, expected = trained(model), trained(plain)
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert_bitwise(one, other, f"number {number} of what training gives")
    assert host.traffic.moved_bytes > 0 and host.traffic.loaded_bytes > 0


def test_the_inputs_are_not_on_the_device() -> None:
    kept = []
    for policy in (policies.full(), policies.full(inputs=Host(least_bytes=0))):
        model = a_model()
        reactivate.apply(model, policy, check="metadata")
        model(torch.randn(BATCH, LENGTH, WIDTH, device=DEVICE)).sum().backward()
        gc.collect()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        loss = model(torch.randn(BATCH, LENGTH, WIDTH, device=DEVICE)).sum()
        kept.append(torch.cuda.memory_allocated() - before)
        loss.backward()
        del loss, model
    assert kept[0] - kept[1] >= (DEPTH - 3) * INPUT


def test_locked_and_device_memory_stay_flat() -> None:
    host = Host(least_bytes=0)
    model = a_model()
    reactivate.apply(model, policies.full(inputs=host))
    locked, held = [], []
    for step in range(60):
        model(torch.randn(BATCH, LENGTH - step % 7, WIDTH, device=DEVICE)).sum().backward()
        model.zero_grad()
        locked.append(host.locked_bytes)
        held.append(torch.cuda.memory_allocated())
    assert max(locked[30:]) <= max(locked[:30])
    assert max(held[30:]) <= max(held[:30])
    host.clear()
    assert host.locked_bytes == 0

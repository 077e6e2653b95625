"""Regions inside of torch_xla's `XlaFullyShardedDataParallel`, and around it, on one device.

The CPU device runs one process. Two devices of it are two threads, on which XLA ends the process in the plain model's first
collective, where one thread waits for the other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_xla
from lazy import DEVICE, XLA
from oracle import Watched
from torch import Tensor, nn
from torch_xla.distributed.fsdp import XlaFullyShardedDataParallel

import reactivate
from reactivate._passes.observing import observed_by

PLACES: dict[str, Callable[[nn.Module], Any]] = {
    "inside": lambda block: sharded(reactivate.checkpoint(block)),
    "around": lambda block: reactivate.checkpoint(sharded(block)),
}


def sharded(block: nn.Module) -> nn.Module:
    return XlaFullyShardedDataParallel(block, reshard_after_forward=True)


def trained(place: Callable[[nn.Module], Any]) -> tuple[list[Tensor], int]:
    torch.manual_seed(0)
    parts = [nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 16)) for _ in range(2)]
    blocks = [place(part.to(DEVICE)) for part in parts]
    parameters = [parameter for block in blocks for parameter in block.parameters()]
    optimizer = torch.optim.SGD(parameters, 0.1)
    x, losses = torch.randn(8, 16).to(DEVICE), []
    torch_xla.manual_seed(5)
    torch_xla.sync()
    for _ in range(3):
        optimizer.zero_grad()
        y = x
        for block in blocks:
            y = block(y)
        loss = y.square().mean()
        loss.backward()
        optimizer.step()
        torch_xla.sync()
        losses.append(loss.detach())
    return [tensor.detach().cpu() for tensor in (*losses, *parameters)], XLA._xla_get_rng_seed("")


@pytest.mark.parametrize("name", PLACES)
def test_three_steps(name: str) -> None:
    expected, seed = trained(sharded)
    watched = Watched()
    with observed_by(watched):
        found, seed_after = trained(PLACES[name])
    assert watched.recomputations == 6
    assert seed == seed_after
    assert len(expected) == len(found) and all(map(torch.equal, expected, found))

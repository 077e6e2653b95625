"""A step on XLA: what it computes, and what the compiler is given."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch_xla
from oracle import Watched
from torch import Tensor, nn

import reactivate
from reactivate._passes.observing import observed_by

DEVICE = torch.device("xla")
XLA = torch_xla._XLAC

Wrap = Callable[[Any], Any]


def plain(fn: Any) -> Any:
    return fn


@dataclass
class Traced(Watched):
    """Steps of a model before the compiler has seen the last of them.

    Attributes:
        found: {what: tensor}: losses, gradients, buffers.
        program: what the compiler would be given for it; empty where every op is one.
        seed: the state of the random numbers afterwards.
    """

    found: dict[str, Tensor]
    program: str = ""
    seed: int = 0

    def count(self, op: str) -> int:
        return len(re.findall(rf" {op}\(", self.program))

    def values(self) -> dict[str, Tensor]:
        return {name: tensor.cpu() for name, tensor in self.found.items()}


class MLP(nn.Module):
    """Blocks whose gradients do not depend on how the compiler fuses."""

    def __init__(self, blocks: int = 4, width: int = 16, dropout: float = 0.0, norm: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_block(width, dropout, norm) for _ in range(blocks))

    def forward(self, x: Tensor, wrap: Wrap = plain) -> Tensor:
        for block in self.blocks:
            x = wrap(block)(x)
        return x


def _block(width: int, dropout: float, norm: bool) -> nn.Sequential:
    parts = [nn.Linear(width, 2 * width), nn.ReLU(), nn.Dropout(dropout), nn.Linear(2 * width, width)]
    return nn.Sequential(*parts, nn.BatchNorm1d(width)) if norm else nn.Sequential(*parts)


def traced(make: Callable[[], nn.Module], wrap: Wrap = plain, steps: int = 1, rows: int = 8, width: int = 16) -> Traced:
    """Steps of a new model; the last one is not run yet."""
    torch.manual_seed(0)
    model = make().to(DEVICE)
    x = torch.randn(rows, width).to(DEVICE).requires_grad_()
    torch_xla.manual_seed(5)
    torch_xla.sync()
    ran = Traced({})
    with observed_by(ran):
        for step in range(steps):
            if step:
                torch_xla.sync()
            loss = model(x, wrap).square().mean()
            loss.backward()
    ran.found["loss"] = loss.detach()
    ran.found |= {
        name: tensor.grad for name, tensor in (("x", x), *model.named_parameters()) if tensor.grad is not None
    }
    ran.found |= dict(model.named_buffers())
    ran.seed = XLA._xla_get_rng_seed("")
    ran.program = XLA._get_xla_tensors_hlo(list(ran.found.values()))
    return ran


def assert_same(one: Traced, other: Traced) -> None:
    first, second = one.values(), other.values()
    assert first.keys() == second.keys()
    assert one.seed == other.seed, "random numbers afterwards"
    for name, value in first.items():
        assert torch.equal(value, second[name]), f"{name} differs"


ours: Wrap = reactivate.checkpoint

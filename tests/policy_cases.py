"""A model for tests of policies, and what a policy saves in each of its regions."""

from __future__ import annotations

from typing import Any

import torch
from oracle import assert_bitwise
from torch import Tensor, nn

import reactivate
from reactivate import policies
from reactivate._passes.observing import observed_by

LINEAR = policies.save_ops("linear")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(4), nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).tanh())


class Model(nn.Module):
    def __init__(self, count: int = 4) -> None:
        super().__init__()
        self.embed, self.layers, self.head = (
            nn.Linear(4, 4),
            nn.ModuleList(Block() for _ in range(count)),
            nn.Linear(4, 2),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Sites:
    """Counts the saved calls of the regions that it watches, by what messages call them."""

    def __init__(self) -> None:
        self.labels: list[list[str]] = []

    def forward_done(self, record: Any) -> None:
        if not reactivate.is_recomputing():
            self.labels.append([site.label for site in record.saved_calls])

    def recomputation_done(self, record: Any) -> None:
        pass


def saved_in(model: nn.Module, policy: Any) -> list[list[str]]:
    """The saved calls of each region of one step, which is bitwise the plain one."""
    x = torch.randn(2, 4, requires_grad=True)
    expected = gradients(model, x)
    handle, sites = reactivate.apply(model, policy), Sites()
    try:
        with observed_by(sites):
            found = gradients(model, x)
    finally:
        handle.remove()
    for index, (one, other) in enumerate(zip(expected, found, strict=True)):
        assert_bitwise(one, other, f"gradient {index}")
    return sites.labels


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(model(x).square().sum(), [x, *model.parameters()]))

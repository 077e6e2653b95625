"""A small residual network, whose layers are regions: for tests and benchmarks of storages."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn


class Block(nn.Module):
    """The feed-forward half of a transformer's layer."""

    def __init__(self, width: int, factor: int = 4) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, factor * width), nn.GELU(), nn.Linear(factor * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x)


class Residual(nn.Module):
    """Layers behind one that makes their input an activation."""

    def __init__(self, width: int, depth: int, layer: Callable[[int], nn.Module] = Block) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.layers = nn.ModuleList(layer(width) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x

"""Models under policies, whose steps the tests of `explain` look into."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from oracle import seed_everything
from several import each
from torch import Tensor, nn
from torch.nn import functional as F

import reactivate
from reactivate.policies import first_match, full, recompute_every, recompute_modules, save_modules, save_ops

RNG_BYTES = 0  # the state of a generator is bytes, and no tensor


class Block(nn.Module):
    def __init__(self, size: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(size)
        self.up = nn.Linear(size, 2 * size)
        self.down = nn.Linear(2 * size, size)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(x)
        hidden = F.gelu(self.up(hidden))
        hidden = self.dropout(self.down(hidden))
        return x + hidden


class Normed(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)
        self.norm = nn.BatchNorm1d(size)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.norm(self.linear(x)))


class Model(nn.Module):
    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 8)
        self.layers = nn.ModuleList(make() for _ in range(4))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x).tanh().sum()


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Block(8, 0.2), Block(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).sin()).cos()


def blocks(dropout: float = 0.0) -> Callable[[], Model]:
    return lambda: Model(lambda: Block(8, dropout))


def recomputed(policy: Any, make: Callable[[], Model]) -> Callable[[], Model]:
    def made() -> Model:
        model = make()
        reactivate.apply(model, policy)
        return model

    return made


NESTED = recompute_modules("layers.*", "layers.*.first")
MODELS: dict[str, Callable[[], Model]] = {
    "plain": blocks(),
    "full": recomputed(full(), blocks()),
    "every second": recomputed(recompute_every(2), blocks()),
    "save_ops": recomputed(first_match(save_ops("linear"), full()), blocks()),
    "save_modules": recomputed(first_match(save_modules("*.up", "*.norm"), full()), blocks()),
    "dropout": recomputed(full(), blocks(0.2)),
    "dropout, saved": recomputed(first_match(save_modules("*.dropout"), full()), blocks(0.2)),
    "batch norm": recomputed(full(), lambda: Model(lambda: Normed(8))),
    "nested": recomputed(NESTED, lambda: Model(Outer)),
    "nested, saved": recomputed(first_match(save_ops("gelu"), NESTED), lambda: Model(Outer)),
}
every_model = each("name", MODELS)


def made(name: str) -> Model:
    seed_everything()
    return MODELS[name]()


def prepared(name: str) -> tuple[Model, Tensor]:
    return made(name), torch.randn(5, 4)

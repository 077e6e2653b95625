"""The results of a host's training: losses, weights, optimizer, random numbers, and what the engine did for it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import oracle
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_flatten_with_path

import reactivate
from reactivate._passes.observing import observed_by

WIDTH, LAYERS, BATCH, STEPS = 8, 3, 64, 3


class Block(nn.Module):
    """A residual block with dropout, and batch norm, whose statistics a second forward would move again."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 4 * WIDTH)
        self.down, self.dropout = nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(torch.tanh(self.up(self.norm(x)))))


class Net(nn.Module):
    """A model that returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def samples() -> Tensor:
    return torch.randn(STEPS * BATCH, WIDTH, generator=torch.Generator().manual_seed(5))


@functools.cache
def plan_of_net() -> reactivate.Plan:
    return reactivate.plan(Net(), samples()[:BATCH], budget="75%")


@dataclass
class Trained(oracle.Watched):
    """The results of a training."""

    state: dict[str, Any] = field(default_factory=dict)
    saved_bytes: int = 0


def trained(train: Callable[[], tuple[nn.Module, Any, list[Tensor]]]) -> Trained:
    """Train.

    Args:
        train: from a seed to the model, the state of its optimizer and the losses.
    """
    oracle.seed_everything()
    ran = Trained()

    def count(tensor: Tensor) -> Tensor:
        ran.saved_bytes += tensor.nbytes if tensor.layout is torch.strided else 0
        return tensor

    with observed_by(ran), saved_tensors_hooks(count, lambda tensor: tensor):
        model, optimizer, losses = train()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    found = {"losses": losses, "model": dict(model.state_dict()), "gradients": gradients, "optimizer": optimizer}
    leaves, _ = tree_flatten_with_path({**found, "random": oracle.random_states()})
    ran.state = {"/".join(map(str, path)): leaf for path, leaf in leaves}
    assert len(losses) >= STEPS and any(loss != losses[0] for loss in losses)
    return ran


def assert_same(plain: Trained, ours: Trained, regions: int = LAYERS * STEPS) -> None:
    """Every bit is the same; and regions ran, each was recomputed, and autograd was left less to save."""
    assert plain.state.keys() == ours.state.keys()
    for name, value in plain.state.items():
        oracle.assert_bitwise(value, ours.state[name], name)
    assert plain.regions == 0
    assert (ours.regions, ours.recomputations) == (regions, regions)
    assert ours.saved_bytes < plain.saved_bytes

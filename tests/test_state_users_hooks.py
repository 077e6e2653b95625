"""Saved-tensor hooks around a region decide what a plain backward reads of state: a copy, or what is there by then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracle import Watched, assert_bitwise
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

import reactivate
from reactivate import policies
from reactivate._engine.record import observed_by

Wrap = Callable[[Any], Any]


def same(tensor: Tensor) -> Tensor:
    return tensor


PACKS: dict[str, Callable[[Tensor], Tensor]] = {"copies": Tensor.clone, "none": same}


class Evaluated(nn.Module):
    """Batch norm whose backward reads running statistics: no version tells that they moved."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4).eval()

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.sin()).sin()

    def change(self) -> None:
        self.norm.train()(torch.randn(8, 4))
        self.norm.eval()


class Scaled(nn.Module):
    """A buffer that a product saves: its version tells."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.rand(4))

    def forward(self, x: Tensor) -> Tensor:
        return (x.sin() * self.scale).sin()

    def change(self) -> None:
        with torch.no_grad():
            self.scale.mul_(1.5)


def trained(kind: type[Any], pack: Callable[[Tensor], Tensor], wrap: Wrap, changes: bool) -> list[Tensor]:
    torch.manual_seed(0)
    module, x = kind(), torch.randn(3, 4, requires_grad=True)
    with saved_tensors_hooks(pack, same):
        out = wrap(module)(x)
    if changes:
        module.change()
    out.square().sum().backward()
    assert x.grad is not None
    return [out.detach(), x.grad, *module.buffers()]


WRAPS: dict[str, Wrap] = {
    "a region": lambda module: reactivate.checkpoint(module),
    "a region in a region": lambda module: reactivate.checkpoint(lambda x: reactivate.checkpoint(module)(x.sin())),
    "a region with a policy": lambda module: reactivate.checkpoint(module, policy=policies.save_ops("sin")),
    "a region in a saved call": lambda module: reactivate.checkpoint(
        lambda x: reactivate.site(reactivate.checkpoint(module), name="inner")(x.sin()).cos(),
        policy=policies.save_names("inner"),
    ),
}


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("pack", PACKS)
@pytest.mark.parametrize("changes", [True, False])
@pytest.mark.parametrize("kind", [Evaluated, Scaled])
def test_state_that_changes_after_the_forward(kind: type[Any], changes: bool, pack: str, wrap: str) -> None:
    chosen = WRAPS[wrap]
    plain = trained(kind, PACKS[pack], lambda module: chosen_plainly(module, wrap), changes)
    ran = Watched()
    with observed_by(ran):
        ours = trained(kind, PACKS[pack], chosen, changes)
    assert ran.regions >= 1 and ran.recomputations >= 1
    for number, (one, other) in enumerate(zip(plain, ours)):
        assert_bitwise(one, other, f"tensor {number}")


def chosen_plainly(module: nn.Module, wrap: str) -> Callable[[Tensor], Tensor]:
    if wrap == "a region in a region":
        return lambda x: module(x.sin())
    if wrap == "a region in a saved call":
        return lambda x: module(x.sin()).cos()
    return module

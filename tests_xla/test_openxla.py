"""Regions under `torch.compile(backend="openxla")`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch_xla
from lazy import DEVICE, XLA
from torch import Tensor, nn

import reactivate
from reactivate import policies


class Net(nn.Module):
    def __init__(self, policy: Any) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Dropout(0.5), nn.Linear(16, 16))
        self.policy = policy

    def forward(self, x: Tensor) -> Tensor:
        block = self.block if self.policy is None else reactivate.checkpoint(self.block, policy=self.policy)
        out: Tensor = block(x)
        return out


def trained(policy: Any = None) -> list[Any]:
    """The steps after two that compile: openxla draws numbers while it does."""
    reactivate.dropin.xla.context_fn()  # the tests import reactivate first: registers the `torch.xla` that torch asks for
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, x = Net(policy).to(DEVICE), torch.randn(8, 16).to(DEVICE)
    compiled = torch.compile(model, backend="openxla")
    found: list[Any] = []
    for step in range(4):
        torch_xla.manual_seed(step)
        torch_xla.sync()
        model.zero_grad()
        loss = compiled(x).sum()
        loss.backward()
        if step > 1:
            found += [loss.detach().cpu(), *(parameter.grad.cpu() for parameter in model.parameters())]
            found.append(XLA._xla_get_rng_seed(""))
    return found


def test_saved_dropout() -> None:
    expected, found = trained(), trained(policies.save_ops("dropout"))
    for one, other in zip(expected, found, strict=True):
        assert torch.equal(one, other) if isinstance(one, Tensor) else one == other


def test_dropout_that_is_recomputed_is_refused_by_torch() -> None:
    with pytest.raises(NotImplementedError, match="run_and_save_rng_state"):
        trained(policies.save_ops("linear"))

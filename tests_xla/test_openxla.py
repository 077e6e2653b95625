"""Regions under `torch.compile(backend="openxla")`."""

from __future__ import annotations

import subprocess
import sys
import textwrap
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


def test_the_order_of_imports_does_not_matter() -> None:
    """torch's function asks for `torch.xla` while the graph is traced: the first traced region registers it."""
    code = """
        import reactivate
        import torch, torch_xla
        assert not hasattr(torch, "xla")
        torch.manual_seed(0)
        block = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5), torch.nn.Tanh()).to("xla")
        region = reactivate.checkpoint(block, policy=reactivate.policies.save_ops("dropout"))
        x = torch.ones(2, 4, device="xla", requires_grad=True)
        torch.compile(lambda x: region(x).sum(), backend="openxla", fullgraph=True)(x).backward()
        assert x.grad.cpu().abs().sum() > 0 and hasattr(torch, "xla")
    """
    subprocess.run([sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)], check=True)


def test_dropout_that_is_recomputed_is_refused_by_torch() -> None:
    with pytest.raises(NotImplementedError, match="run_and_save_rng_state"):
        trained(policies.save_ops("linear"))

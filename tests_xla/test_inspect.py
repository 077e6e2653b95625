"""`verify`, `explain` and `plan` of models on XLA."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch_xla
from lazy import DEVICE, XLA
from oracle import Watched
from torch import Tensor, nn

import reactivate
from reactivate import policies, storage
from reactivate._passes.observing import observed_by
from reactivate.errors import UnsupportedError


class Block(nn.Module):
    """Sums that a compiler rounds as it fuses them, dropout, and a buffer."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.stats = nn.BatchNorm1d(width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.down(nn.functional.dropout(nn.functional.gelu(self.up(self.norm(x))), 0.2)) + x
        return self.stats(torch.softmax(x, -1))


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(3)))


@pytest.fixture
def x() -> Tensor:
    return torch.randn(32, 64)


POLICIES: dict[str, Any] = {
    "whole": None,
    "blocks": policies.recompute_modules(Block),
    "linear": policies.first_match(policies.save_ops("linear"), policies.recompute_modules(Block)),
    "dropout": policies.first_match(policies.save_ops("dropout"), policies.recompute_modules(Block)),
}


@pytest.mark.parametrize("draws", [0, 3])
@pytest.mark.parametrize("name", POLICIES)
def test_verify(name: str, draws: int, x: Tensor) -> None:
    subject = model().to(DEVICE)
    torch_xla.manual_seed(5)
    for _ in range(draws):
        torch.rand(2, device=DEVICE)
    before = XLA._xla_get_rng_seed("")
    verdict = reactivate.verify(subject, (x.to(DEVICE),), policy=POLICIES[name])
    assert verdict, verdict
    assert verdict.recomputations == (1 if name == "whole" else 3)
    assert verdict.kept_bytes < verdict.plain_bytes
    assert not XLA._get_use_eager_mode()
    assert XLA._xla_get_rng_seed("") == before
    torch_xla.sync()
    assert XLA._xla_get_rng_seed("") == (1012031 + 5 * 7012063) % 2**64


def test_verify_finds_a_difference(x: Tensor) -> None:
    def forward(x: Tensor) -> Tensor:
        return (x * (2 if reactivate.is_recomputing() else 1)).exp().sin()

    verdict = reactivate.verify(forward, (x.to(DEVICE).requires_grad_(),))
    assert not verdict
    assert "gradient of args[0] is different, by up to" in str(verdict)
    assert not XLA._get_use_eager_mode()


@pytest.mark.parametrize("name", ["blocks", "linear", "dropout"])
def test_explain_counts_as_on_the_cpu(name: str, x: Tensor) -> None:
    found = []
    for device in ("cpu", DEVICE):
        subject = model().to(device)
        reactivate.apply(subject, POLICIES[name])
        explanation = reactivate.explain(subject, (x.to(device),))
        assert len(explanation.regions) == 3
        assert str(explanation)
        found.append(
            [(entry.path, entry.action, entry.input_bytes, entry.result_bytes) for entry in explanation.regions]
        )
    assert found[0] == found[1]


STORAGES: dict[str, Callable[[Any], Any]] = {
    "host": lambda path: storage.Host(),
    "disk": lambda path: storage.Disk(path),
}


@pytest.mark.parametrize("name", STORAGES)
def test_a_storage_is_refused(name: str, x: Tensor, tmp_path: Path) -> None:
    """A copy would end the program that is being recorded."""
    kept = STORAGES[name](tmp_path)
    saving = policies.first_match(policies.save_ops("linear", storage=kept), policies.recompute_modules(Block))
    for policy in (saving, policies.recompute_modules(Block, inputs=kept)):
        subject = model().to(DEVICE)
        reactivate.apply(subject, policy)
        with pytest.raises(UnsupportedError, match=r"shape \[32, .* on xla:0.*Leave out storage= and inputs= on XLA"):
            subject(x.to(DEVICE).requires_grad_().exp()).sum().backward()


def test_a_storage_of_yours(x: Tensor) -> None:
    class Kept:
        def __init__(self) -> None:
            self.saved = 0

        def save(self, tensor: Tensor) -> Tensor:
            self.saved += 1
            return tensor.clone()

        def load(self, handle: Tensor) -> Tensor:
            return handle

    kept = Kept()
    saving = policies.first_match(policies.save_ops("linear", storage=kept), policies.recompute_modules(Block))
    verdict = reactivate.verify(model().to(DEVICE), (x.to(DEVICE),), policy=saving)
    assert verdict and kept.saved >= 3


def test_plan_is_refused_and_one_of_a_copy_fits(x: Tensor) -> None:
    here, there = model(), model().to(DEVICE)
    with pytest.raises(UnsupportedError, match=r"plan: the model is on xla:0.*Plan a copy on the CPU"):
        reactivate.plan(there, (x.to(DEVICE),), budget="50%")
    plan = reactivate.plan(copy.deepcopy(here).to("meta"), (x.to("meta"),), budget="60%", device="H100-SXM")
    reactivate.apply(there, plan)
    watched = Watched()
    with observed_by(watched):
        there(x.to(DEVICE)).sum().backward()
    assert watched.recomputations > 0

"""Regions around torch_xla's `scan` and `scan_layers`, and inside of what these trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_xla
from functorch.compile import min_cut_rematerialization_partition
from lazy import DEVICE, XLA, Traced, Wrap, assert_same, ours, plain
from torch import Tensor, nn
from torch_xla.experimental.scan import scan
from torch_xla.experimental.scan_layers import scan_layers

import reactivate
from reactivate import policies
from reactivate._passes.observing import observed_by
from reactivate.errors import UnsupportedError

Run = Callable[[nn.ModuleList, Tensor], Tensor]


class Layer(nn.Module):
    """Two products, and numbers that `scan` draws (it cannot trace `dropout` on a CPU, with regions or without)."""

    def __init__(self, wrap: Wrap, rate: float) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)
        self.wrap, self.rate = wrap, rate

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.wrap(self.computed)(x)
        return out

    def computed(self, x: Tensor) -> Tensor:
        x = self.up(x).relu()
        if self.rate:
            x = x * (torch.rand_like(x) > self.rate).to(x.dtype)
        out: Tensor = self.down(x)
        return out


def trained(run: Run, wrap: Wrap = plain, rate: float = 0.0) -> Traced:
    """Two steps of four layers."""
    torch.manual_seed(0)
    layers = nn.ModuleList(Layer(wrap, rate) for _ in range(4)).to(DEVICE)
    x = torch.randn(8, 16).to(DEVICE).requires_grad_()
    torch_xla.manual_seed(5)
    torch_xla.sync()
    ran = Traced({})
    with observed_by(ran):
        for _ in range(2):
            torch_xla.sync()
            loss = run(layers, x).square().mean()
            loss.backward()
    ran.found = {"loss": loss.detach(), "x": x.grad}
    ran.found |= {name: parameter.grad for name, parameter in layers.named_parameters() if parameter.grad is not None}
    ran.seed = XLA._xla_get_rng_seed("")
    ran.program = XLA._get_xla_tensors_hlo(list(ran.found.values()))
    torch_xla.sync()
    return ran


def of_layers(layers: nn.ModuleList, x: Tensor) -> Tensor:
    return scan_layers(layers, x)


def of_pure_layers(layers: nn.ModuleList, x: Tensor) -> Tensor:
    return scan_layers(layers, x, is_layer_pure=True)


def of_a_function(layers: nn.ModuleList, x: Tensor) -> Tensor:
    weights = torch.stack([layer.up.weight for layer in layers])
    carry, rows = scan(lambda x, weight: (((x @ weight.t()).tanh() @ weight), x.sum(0)), x, weights)
    return carry * rows.sum()


RUNS: dict[str, Run] = {run.__name__: run for run in (of_layers, of_pure_layers, of_a_function)}


@pytest.mark.parametrize(("name", "rate"), [("of_layers", 0.3), ("of_pure_layers", 0.0), ("of_a_function", 0.0)])
def test_a_region_around(name: str, rate: float) -> None:
    """Forward, recomputation and backward are a loop each."""
    before = trained(RUNS[name], rate=rate)
    after = trained(lambda layers, x: reactivate.checkpoint(RUNS[name])(layers, x), rate=rate)
    assert after.recomputations >= 2
    assert (before.count("while"), after.count("while")) == (2, 3)
    assert (before.count("opt-barrier"), after.count("opt-barrier")) == (0, 1)
    assert_same(before, after)


def nested(fn: Any) -> Any:
    return ours(lambda x: ours(fn)(x))


@pytest.mark.parametrize("wrap", [ours, nested], ids=["one", "nested"])
def test_regions_inside(wrap: Wrap) -> None:
    """The loop of the backward has the first product of a layer again; the second saves nothing."""
    before, after = trained(of_layers), trained(of_layers, wrap)
    assert (before.count("while"), after.count("while")) == (2, 2)
    assert after.count("dot") == before.count("dot") + 1
    assert_same(before, after)


def test_random_numbers_inside() -> None:
    """They are drawn once. `default_partition` leaves a dead draw in a backward without regions: it would move the seed."""

    def cut(layers: nn.ModuleList, x: Tensor) -> Tensor:
        return scan_layers(layers, x, partition_fn=min_cut_rematerialization_partition)

    before, after = trained(cut, rate=0.3), trained(of_layers, ours, rate=0.3)
    assert after.count("dot") == before.count("dot") + 1
    assert after.count("rng-bit-generator") == before.count("rng-bit-generator")
    assert_same(before, after)


def test_a_policy_inside_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"'computed' has a policy.*Leave the policy out"):
        trained(of_layers, lambda fn: reactivate.checkpoint(fn, policy=policies.save_ops("linear")))


def test_regions_inside_and_around() -> None:
    before = trained(of_layers)
    after = trained(lambda layers, x: reactivate.checkpoint(of_layers)(layers, x), ours)
    assert after.recomputations >= 2
    assert after.count("while") == 3
    assert_same(before, after)

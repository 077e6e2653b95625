"""Models that `explain`, `verify`, `compare` and `plan` take with care: backwards inside, lazy modules, reentrant regions."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from several import each
from torch import Tensor, nn
from torch.utils import checkpoint

import reactivate
from reactivate import policies
from reactivate.errors import UnsupportedError, UsageError


class WithAnAuxiliaryLoss(nn.Module):
    """Runs a backward in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.layer(x).mean().backward()
        return self.layer(x).tanh()


TOOLS: list[Callable[..., Any]] = [
    reactivate.explain,
    reactivate.verify,
    functools.partial(reactivate.compare, policy=policies.recompute_modules("layer")),
]


@each("tool", TOOLS)
def test_gradients_of_a_forward_are_taken_away_again(tool: Any) -> None:
    model = WithAnAuxiliaryLoss()
    tool(model, torch.randn(2, 4))
    assert model.layer.weight.grad is model.layer.bias.grad is None


@each(
    "tool", [*TOOLS, functools.partial(reactivate.plan, budget="90%"), functools.partial(reactivate.explain, fake=True)]
)
def test_a_model_whose_first_call_makes_its_parameters_is_to_be_called_before(tool: Any) -> None:
    model = nn.Sequential(nn.LazyLinear(3), nn.Sequential(nn.Linear(3, 3)))
    with pytest.raises(UsageError, match=r"makes its parameters; 0.weight has no values yet. Call the model once"):
        tool(model, torch.randn(2, 4))


class Reentrant(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint.checkpoint(self.layer, x, use_reentrant=True)  # type: ignore[no-any-return]


@pytest.mark.usefixtures("whole_heap")
@each("tool", TOOLS)
def test_torchs_reentrant_checkpoint_is_refused_in_words_and_ours_in_its_place_is_not(tool: Any) -> None:
    x = torch.randn(2, 4, requires_grad=True)
    with pytest.raises(UnsupportedError, match=r"use_reentrant=False there, or run this inside of .*install"):
        tool(Reentrant(), x)
    with reactivate.dropin.install():
        tool(Reentrant(), x)

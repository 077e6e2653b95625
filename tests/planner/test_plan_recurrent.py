"""Plans of recurrent layers: wherever they are they are units, and what their kernels take for themselves counts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from memory import allocated_by
from torch import Tensor, nn
from torch.nn import functional as F

import reactivate
from reactivate.errors import PlanInfeasible


class Stack(nn.Module):
    """Layers as attributes."""

    def __init__(self, layer: Callable[..., nn.Module], **options: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 48)
        wide = 96 if options.get("bidirectional") else 48
        for number in range(1, 5):
            self.add_module(f"rnn{number}", layer(48 if number == 1 else wide, 48, batch_first=True, **options))
        self.head = nn.Linear(wide, 64)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in (self.rnn1, self.rnn2, self.rnn3, self.rnn4):
            x = layer(x)[0].tanh()
        return self.head(x)


class Named(Stack):
    """Layers in a dict."""

    def __init__(self, layer: Callable[..., nn.Module]) -> None:
        super().__init__(layer)
        self.layers = nn.ModuleDict({name: layer(48, 48, batch_first=True) for name in ("one", "two", "three")})

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.rnn1(self.embed(tokens))[0]
        for layer in self.layers.values():
            x = x + layer(x)[0]
        return self.head(x)


class Cells(nn.Module):
    """Cells that are called for each token."""

    def __init__(self, layer: type[nn.GRUCell]) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(64, 48), nn.Linear(48, 64)
        self.cell1, self.cell2 = layer(48, 48), layer(48, 48)

    def forward(self, tokens: Tensor) -> Tensor:
        one = two = torch.zeros(len(tokens), 48)
        out = []
        for x in self.embed(tokens[:, :12]).unbind(1):
            one = self.cell1(x, one)
            two = self.cell2(one, two)
            out.append(self.head(two))
        return torch.stack(out, 1)


MODELS: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "LSTM": (lambda: Stack(nn.LSTM), [f"rnn{number}" for number in range(1, 5)]),
    "LSTM of two layers, both ways": (
        lambda: Stack(nn.LSTM, num_layers=2, bidirectional=True, dropout=0.2),
        [f"rnn{number}" for number in range(1, 5)],
    ),
    "GRU": (lambda: Stack(nn.GRU), [f"rnn{number}" for number in range(1, 5)]),
    "RNN": (lambda: Stack(nn.RNN), [f"rnn{number}" for number in range(1, 5)]),
    "LSTM in a dict": (lambda: Named(nn.LSTM), ["rnn1", "layers.one", "layers.two", "layers.three"]),
    "GRU cells": (lambda: Cells(nn.GRUCell), ["cell1", "cell2"]),
}


def loss_of(logits: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), torch.zeros(logits.shape[:2].numel(), dtype=torch.long))


@pytest.mark.parametrize("name", MODELS)
def test_the_promise_is_what_is_measured(name: str) -> None:
    torch.manual_seed(0)
    make, units = MODELS[name]
    model, tokens = make(), torch.randint(64, (8, 40))
    first = reactivate.plan(model, tokens, budget="100%", loss=loss_of)
    assert {decision.path for decision in first.decisions} == set(units)

    def step() -> None:
        logits = model(tokens)  # alive in the backward, as the plan takes for granted
        loss_of(logits).backward()

    own = first.plain.peak_bytes - first.fixed.total
    for budget in ("75%", "55%"):
        try:
            plan = first.at(budget)
        except PlanInfeasible as error:
            plan = first.at(error.least_bytes)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        with reactivate.apply(model, plan) as handle:
            assert handle.regions
            step()
            peak = allocated_by(step).peak_bytes
        model.zero_grad()
        assert plan.fixed.total + peak <= plan.budget_bytes
        assert peak < own
        assert abs(plan.predicted.peak_bytes - plan.fixed.total - peak) <= 0.005 * own
        verdict = reactivate.verify(model, tokens, policy=plan)
        assert verdict.is_same and verdict.regions > 0

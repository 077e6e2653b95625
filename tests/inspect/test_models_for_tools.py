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
from reactivate._inspect.verify import Verdict
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


# -- what the forward writes to beside the model ----------------------------------------------------------------------


class Given(nn.Module):
    """Takes an object beside its input, and changes it."""

    def __init__(self, change: Callable[[Any], Any]) -> None:
        super().__init__()
        self.layer, self.change = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), change
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2)))

    def forward(self, x: Tensor, given: Any) -> Tensor:
        return self.blocks(self.layer(x * self.change(given)))  # type: ignore[no-any-return]


def _count(cache: dict[str, float]) -> float:
    cache["steps"] = cache.get("steps", 0.5) * 2
    return cache["steps"]


def _append(items: list[float]) -> float:
    items.append(1.5)
    return sum(items)


def _scale(tensor: Tensor) -> Tensor:
    return tensor.mul_(1.5)


ALL_TOOLS = [*TOOLS, functools.partial(reactivate.plan, budget="100%")]


@each(
    ("change", "make", "show"),
    [
        (_count, dict, dict.copy),
        (_append, lambda: [1.0], list.copy),
        (_scale, lambda: torch.ones(4), Tensor.tolist),
        (next, lambda: iter([float(number) for number in range(1, 40)]), next),
    ],
)
def test_what_a_model_is_called_with_is_as_it_was(
    change: Any, make: Callable[[], Any], show: Callable[[Any], Any]
) -> None:
    for tool in ALL_TOOLS:
        given = make()
        found = tool(Given(change), (torch.randn(2, 4), given))
        assert found or not isinstance(found, Verdict), found
        assert show(given) == show(make()), tool


def test_a_large_argument_that_the_forward_writes_to_is_put_back_from_the_second_run_on() -> None:
    for tool in ALL_TOOLS:
        given = torch.ones(2000, 4)
        with pytest.warns(
            UserWarning, match=r"writes to parameters or arguments in its forward: args\[1\]. This run has"
        ):
            found = tool(Given(_scale), (torch.randn(2000, 4), given))
        assert found or not isinstance(found, Verdict), found
        assert torch.equal(given, torch.full((2000, 4), 1.5)), tool


def test_what_a_step_counts_is_as_it_was_before_it_was_planned() -> None:
    model, x = Given(lambda _: 1), torch.randn(2, 4)
    counts, losses, total = [0], {}, torch.zeros(4)

    def step() -> None:
        counts[0] += 1
        out = model(x, None)
        total.add_(out.detach().mean(0))
        loss = out.square().sum()
        losses[counts[0]] = loss.item()
        loss.backward()

    plan = reactivate.plan(model, step=step, budget="1MiB")
    plan.measure()
    assert counts == [0] and not losses and not total.any()
    step()
    assert counts == [1] and len(losses) == 1 and total.any()


def test_a_gradient_that_an_argument_retains_is_as_it_was() -> None:
    x = torch.randn(2, 4, requires_grad=True) * 2
    x.retain_grad()
    for tool in TOOLS:
        tool(Given(lambda _: 1), (x, None))
    assert x.grad is None

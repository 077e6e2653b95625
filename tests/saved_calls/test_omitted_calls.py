"""Calls that the forward makes and a recomputation does not: saved calls behind them are still right."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracle import compare
from several import each
from torch import Tensor, nn

import reactivate
from reactivate import policies

STEPS = 3


def of_every_other_call(site: Any) -> Any:
    return reactivate.Save() if site.op == "mul" and site.index % 2 else None


def of_two_ops(site: Any) -> Any:
    return reactivate.Save() if site.op in ("mul", "sin") else None


def of_linears(site: Any) -> Any:
    return reactivate.Save() if site.op == "linear" else None


def of_modules(site: Any) -> Any:
    return reactivate.Save() if site.module is not None and site.path else None


POLICIES: dict[str, Any] = {
    "ops": policies.save_ops("mul", "add", "linear"),
    "every second": policies.every_nth(2, policies.save_ops("mul")),
    "every other call": of_every_other_call,
    "two ops": of_two_ops,
    "linears": of_linears,
    "modules": of_modules,
}


class Probed(nn.Module):
    """A model that looks at its own layers where that is a forward.

    Args:
        late: how many forwards look at nothing: the first calls of a region are compared.
    """

    def __init__(self, late: int) -> None:
        super().__init__()
        self.linear, self.late, self.calls, self.seen = nn.Linear(4, 4), late, 0, [0.0]

    def refined(self, x: Tensor) -> Tensor:
        return self.linear(x) * 0.9 + 0.1

    def forward(self, x: Tensor) -> Tensor:
        y = self.refined(x)
        if not reactivate.is_recomputing():
            self.calls += 1
            if self.calls > self.late:
                with torch.no_grad():
                    self.seen.append(self.refined(torch.zeros(2, 4)).mean().item())
        for _ in range(3):
            y = self.refined(y)
        return y.sin()


class Cached(Probed):
    """A model that looks once."""

    def __init__(self, late: int) -> None:
        super().__init__(late)
        self.table = functools.cache(lambda count: (torch.arange(count) * 1.0 * 0.9) + 0.1)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y = self.linear(x)
        if self.calls > self.late:
            y = y + self.table(4)
        for _ in range(3):
            y = self.refined(y)
        return y.sin()


class Keeping(nn.Module):
    """A layer with a cache, in a tree of more than 64 modules, where it is noted when the forward reaches it."""

    def __init__(self, late: int, has_graph: bool = False) -> None:
        super().__init__()
        self.cache: dict[str, Tensor] = {}
        self.has_graph, self.linear = has_graph, nn.Linear(4, 8)

    def forward(self, x: Tensor) -> Tensor:
        query, key = self.linear(x).chunk(2, -1)
        self.cache["key"] = key if self.has_graph else key.detach()
        return query + key


class Large(nn.Module):
    def __init__(self, late: int, has_graph: bool = False) -> None:
        super().__init__()
        self.layer, self.head = Keeping(late, has_graph), nn.Linear(4, 4)
        self.norm, self.others = nn.BatchNorm1d(4), nn.ModuleList(nn.Identity() for _ in range(80))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.layer(x))
        for _ in range(4):
            y = y * 0.9
        return self.head(y).relu()


MODELS: dict[str, Callable[[int], nn.Module]] = {
    "probed": Probed,
    "cached": Cached,
    "large": Large,
    "large, with a graph": functools.partial(Large, has_graph=True),
}


@each("policy, check", [*((policy, "metadata") for policy in POLICIES), ("ops", "first")])
@pytest.mark.parametrize("model", MODELS)
def test_every_bit(model: str, policy: str, check: Any) -> None:
    for late in (0, 2):

        def results(wrap: Any, late: int = late) -> list[Any]:
            torch.manual_seed(0)
            made: Any = MODELS[model](late)
            call = wrap(made)
            for _ in range(STEPS):
                call(torch.randn(3, 4)).sum().backward()
            return [*(item.grad for item in made.parameters()), *made.buffers(), *getattr(made, "seen", ())]

        watched = compare(results, policy=POLICIES[policy], check=check)
        assert watched.recomputations == STEPS


@pytest.mark.parametrize("has_graph", [False, True])
def test_what_a_large_tree_copies_is_no_op_of_the_region(has_graph: bool) -> None:
    def results(wrap: Any) -> list[Any]:
        torch.manual_seed(0)
        made = Large(0, has_graph)
        for _ in range(STEPS):
            wrap(made)(torch.randn(3, 4)).sum().backward()
        return [*(item.grad for item in made.parameters()), *made.buffers()]

    compare(results, check="every")


class Asking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.behind = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.before(x).sin()
        if not reactivate.is_recomputing():
            y.mean()
        return self.behind(y).sin().exp()


def test_calls_before_the_question_are_saved_and_a_report_says_why_others_are_not() -> None:
    model = nn.Sequential(Asking(), nn.Linear(4, 4))
    policy = policies.first_match(policies.save_modules("0.before", "0.behind"), policies.recompute_modules("0"))
    with reactivate.apply(model, policy):
        told = json.dumps(reactivate.explain(model, torch.randn(3, 4)).to_json())
    assert told.count("the region has asked is_recomputing()") == 1

"""Limits of modules: under two names, parametrized, copied or saved by a policy."""

from __future__ import annotations

import copy
import gc
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from limit_cases import leaf, plain, shows, torchs
from torch import Tensor, nn

import reactivate
from reactivate import policies
from reactivate.errors import RecomputeMismatchError, UsageError


@shows("Shallow copies of a model with a policy")
def test_a_shallow_copy_runs_the_module_that_it_is_a_copy_of() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    reactivate.apply(model, policies.recompute_modules("0"))
    replica: Any = model[0]._replicate_for_data_parallel()
    replica.weight, replica.bias = torch.zeros(4, 4), torch.zeros(4)
    assert replica(leaf()).any(), "it ran with the parameters of the original"

    shallow, deep = copy.copy(model[0]), copy.deepcopy(model[0])
    del model
    gc.collect()
    with pytest.raises(UsageError, match="copy.deepcopy"):
        shallow(leaf())
    assert deep(leaf()).any()


@shows("Cached parametrizations")
def test_cached_parametrizations() -> None:
    module = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
    for wrap in (reactivate.checkpoint, torchs):
        with nn.utils.parametrize.cached():
            outputs = [wrap(module)(leaf()) for _ in range(2)]
        with pytest.raises(RuntimeError):
            sum(outputs).sum().backward()

    def inside(x: Tensor) -> Tensor:
        with nn.utils.parametrize.cached():
            return module(x) + module(x).sin()

    found = []
    for wrap in (plain, reactivate.checkpoint):
        x = torch.ones(4, 4, requires_grad=True)
        wrap(inside)(x).sum().backward()
        found.append(x.grad)
    assert torch.equal(*found)


@shows("Checkpointed modules")
def test_a_module_under_two_names_and_a_class_with_slots() -> None:
    class Slotted(nn.Linear):
        __slots__ = ("extra",)

    linear = nn.Linear(4, 4)
    both = nn.ModuleDict({"block": linear, "fast": reactivate.checkpoint(linear)})
    assert list(both.state_dict()) == ["block.weight", "block.bias", "fast.weight", "fast.bias"]
    assert len(list(both.parameters())) == 2
    slotted = reactivate.checkpoint(Slotted(4, 4))
    assert not isinstance(slotted, nn.Module)
    slotted(leaf()).sum().backward()


class Sine(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sin()


@shows("Effects of saved modules")
@pytest.mark.parametrize("is_saved", [False, True])
def test_effects_of_saved_modules(is_saved: bool) -> None:
    class Compares(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.child = Sine()

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.child(x)
            return (hidden.exp() if type(hidden.grad_fn).__name__ == "SinBackward0" else hidden).cos()

    policy = policies.save_modules("child") if is_saved else None
    out = reactivate.checkpoint(Compares(), policy=policy)(leaf(4))
    with pytest.raises(RecomputeMismatchError) if is_saved else nullcontext():
        out.sum().backward()

"""Limits of TorchScript, of `torch.fx` and of `torch.compile`, which run a function in other code."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from queue import SimpleQueue
from types import MappingProxyType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from limit_cases import Fn, leaf, shows
from oracle import Ran, assert_bitwise
from torch import Tensor, nn

import reactivate
from reactivate import policies
from reactivate._passes.observing import observed_by
from reactivate.errors import UnsupportedError


def first_scripted(x: Tensor, bias: Tensor) -> Tensor:
    return torch.tanh(x * 0.7 + bias) * x


def second_scripted(x: Tensor, bias: Tensor) -> Tensor:
    return torch.tanh(x * 0.7 + bias) * x


@shows("TorchScript")
def test_torchscript() -> None:
    found = torch.jit.script(first_scripted)
    with pytest.warns(UserWarning, match="keeps its activations"):
        reactivate.checkpoint(lambda x, bias: found(x.sin(), bias))(leaf(), leaf())
    hidden: SimpleQueue[Any] = SimpleQueue()
    hidden.put(torch.jit.script(second_scripted))

    def fn(x: Tensor, bias: Tensor) -> Tensor:
        last = hidden.get()
        hidden.put(last)
        out: Tensor = last(x.sin(), bias)
        return out

    with pytest.raises(UnsupportedError, match="Call the scripted function"):
        reactivate.checkpoint(fn)(leaf(), leaf())


@shows("`torch.fx.symbolic_trace`")
def test_symbolic_trace() -> None:
    """Without a word: that a policy has matched nothing is said of the first call that computes something."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return F.gelu(self.linear(x))

    model, x = nn.Sequential(Block(), Block()), torch.randn(2, 4)
    parameters = list(model.parameters())
    for policy, is_right in ((policies.full(save=["linear"]), True), (policies.full(save=["conv2d"]), False)):
        regions = Ran()
        reactivate.apply(model, policy, replace=True)
        with warnings.catch_warnings(), observed_by(regions):
            warnings.simplefilter("error")
            traced = torch.fx.symbolic_trace(model)
            expected = [traced(x), *torch.autograd.grad(traced(x).sum(), parameters)]
        assert {node.op for node in traced.graph.nodes} == {"placeholder", "call_module", "call_function", "output"}
        assert not regions.recomputations
        with (
            nullcontext() if is_right else pytest.warns(UserWarning, match="matches nothing so far"),
            observed_by(regions),
        ):
            result = model(x)
            found = [result, *torch.autograd.grad(result.sum(), parameters)]
        assert regions.recomputations == 2
        for one, other in zip(expected, found, strict=True):
            assert_bitwise(one, other, "result or gradient")


@shows("torch 2.9 and `torch.compile` inside a region")
def test_torch_2_9_and_compile_inside_a_region() -> None:
    """Between forward and backward another version is compiled, which fits as well."""
    runs: list[int] = []
    hidden = MappingProxyType({"runs": runs})

    def count(module: Any, inputs: Any) -> Fn:
        number = len(runs)
        runs.append(0)

        def run(*args: Any) -> Any:
            hidden["runs"][number] += 1
            return module(*args)

        return run

    torch._dynamo.reset()
    compiled = torch.compile(lambda x: x.sin().cos(), backend=count)
    out = reactivate.checkpoint(lambda x: compiled(x.tanh()).exp())(leaf())
    for rows in (5, 6):
        compiled(leaf(rows, 4).tanh())
    assert runs == [1, 2]
    out.sum().backward()
    assert runs == ([1, 3] if torch.__version__.startswith("2.9.") else [2, 2])
    torch._dynamo.reset()

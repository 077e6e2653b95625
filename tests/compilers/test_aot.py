"""Regions inside of what AOTAutograd traces without dynamo."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from functorch.compile import aot_function, default_partition, make_boxed_func
from torch import Tensor

import reactivate
from reactivate import guards, policies
from reactivate.errors import UnsupportedError

Wrap = Callable[[Any], Any]


def block(x: Tensor, weight: Tensor) -> Tensor:
    return ((x @ weight).tanh() @ weight).sin()


def traced(wrap: Wrap) -> tuple[list[Tensor], list[str], list[str]]:
    """Return output and gradients, and the ops of the forward graph and of the backward graph."""
    graphs: list[list[str]] = []

    def note(module: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append([str(node.target) for node in module.graph.nodes])
        return make_boxed_func(module)

    function = aot_function(
        lambda x, weight: wrap(block)(wrap(block)(x, weight), weight),
        fw_compiler=note,
        bw_compiler=note,
        partition_fn=default_partition,
    )
    torch.manual_seed(0)
    x, weight = (torch.randn(4, 4, requires_grad=True) for _ in range(2))
    out = function(x, weight)
    out.sum().backward()
    assert x.grad is not None and weight.grad is not None
    return [out.detach(), x.grad, weight.grad], *graphs


def nested(fn: Any) -> Any:
    return reactivate.checkpoint(lambda *args: reactivate.checkpoint(fn)(*args))


@pytest.mark.parametrize("wrap", [reactivate.checkpoint, nested], ids=["one", "nested"])
def test_the_backward_graph_recomputes(wrap: Wrap) -> None:
    expected, forward, backward = traced(lambda fn: fn)
    found, same, more = traced(wrap)
    assert forward.count("aten.mm.default") == same.count("aten.mm.default") == 4
    assert more.count("aten.tanh.default") == 2 and "aten.tanh.default" not in backward
    for one, other in zip(expected, found, strict=True):
        assert torch.equal(one, other)


def test_regions_are_off_where_they_are_everywhere() -> None:
    def without_gradient(fn: Any) -> Any:
        def call(*args: Tensor) -> Tensor:
            with torch.no_grad():
                reactivate.checkpoint(fn)(*args)
            out: Tensor = fn(*args)
            return out

        return call

    assert "aten.tanh.default" not in traced(without_gradient)[2]


@pytest.mark.parametrize(
    "options",
    [
        {"policy": policies.save_ops("matmul")},
        {"guards": guards.DEFAULT.adding(guards.ContextPair(lambda: (None, None)))},
    ],
    ids=["policy", "contexts"],
)
def test_what_nodes_do_not_tell_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedError, match=r"'block' has a policy or a pair of contexts.*Leave the policy out"):
        traced(lambda fn: reactivate.checkpoint(fn, **options))

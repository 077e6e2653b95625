"""Parameters that a sharding library gathers for each use and lets go of behind it, by `parameter.data = other`.

A stand-in does what DeepSpeed's ZeRO-3 does: hooks around the forward of each module, and around its backward, where what the
backward has gathered must still be there when a recomputation of the same module has let go of it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracle import Watched, assert_alike
from torch import Tensor, nn

import reactivate
from reactivate import policies
from reactivate._passes.observing import observed_by


class Product(torch.autograd.Function):
    """A product that reads its weight in backward as it is then."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.t() @ x if ctx.needs_input_grad[1] else None


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8) / 3)

    def forward(self, x: Tensor) -> Tensor:
        return Product.apply(x, self.weight).tanh()  # type: ignore[no-any-return]


class Boundary(torch.autograd.Function):
    """Calls a function when the backward comes through."""

    @staticmethod
    def forward(ctx: Any, call: Any, x: Tensor) -> Tensor:
        ctx.call = call
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.call()
        return None, gradient


class Shards:
    """Keeps the weights of a model, and gathers them around each use of a module."""

    def __init__(self, model: nn.Module) -> None:
        self.whole = {parameter: parameter.data for parameter in model.parameters()}
        self.most = 0  # weights that were gathered at one time
        for module in model.modules():
            if isinstance(module, Linear):
                self.release(module)
                module.register_forward_pre_hook(self.before_forward)
                module.register_forward_hook(self.after_forward)

    def gather(self, module: Linear) -> None:
        if not module.weight.numel():
            module.weight.data = self.whole[module.weight].clone()
            module.weight.status = "gathered"  # type: ignore[attr-defined]
        self.most = max(self.most, self.gathered())

    def release(self, module: Linear) -> None:
        module.weight.data = torch.empty(0)
        module.weight.status = "released"  # type: ignore[attr-defined]

    def gathered(self) -> int:
        return sum(bool(parameter.numel()) for parameter in self.whole)

    def before_forward(self, module: Any, args: Any) -> Any:
        self.gather(module)
        (x,) = args
        return (Boundary.apply(lambda: self.release(module), x),) if x.requires_grad else args

    def after_forward(self, module: Any, args: Any, result: Tensor) -> Tensor:
        self.release(module)
        return Boundary.apply(lambda: self.gather(module), result)  # type: ignore[no-any-return]


@pytest.mark.parametrize("is_frozen", [False, True])
@pytest.mark.parametrize("layers", [2, 40])  # a tree of more than 64 modules is noted as it is reached
@pytest.mark.parametrize(
    "early_stop", [False, True]
)  # without, the last module lets go of its weight before its backward
@pytest.mark.parametrize("way", ["block", "blocks", "saved"])
def test_weights_that_are_gathered_for_each_use(way: str, early_stop: bool, layers: int, is_frozen: bool) -> None:
    def run(is_plain: bool) -> list[Any]:
        torch.manual_seed(0)
        blocks = [nn.Sequential(*(nn.Sequential(Linear()) for _ in range(layers))) for _ in range(2)]
        model = nn.Sequential(*blocks)
        for parameter in list(model.parameters())[1::2]:
            parameter.requires_grad_(not is_frozen)
        shards = Shards(model)
        call: Any = model
        if not is_plain and way == "block":
            call = nn.Sequential(*(reactivate.checkpoint(block, early_stop=early_stop) for block in blocks))
        elif not is_plain:
            saved = policies.save_modules("*.0.0") if way == "saved" else policies.none()
            policy = policies.first_match(saved, policies.recompute_modules("0", "1"))
            reactivate.apply(model, policy, early_stop=early_stop)
        found: list[Any] = []
        for _ in range(3):
            x = torch.randn(4, 8, requires_grad=True)
            out = call(x)
            out.sum().backward()
            assert not shards.gathered(), "what was gathered is let go of"
            found += [out, x.grad, *(parameter.grad for parameter in model.parameters())]
            for parameter in model.parameters():
                parameter.grad = None
        return found

    expected = run(is_plain=True)
    watched = Watched()
    with observed_by(watched):
        found = run(is_plain=False)
    assert watched.recomputations >= 6
    assert_alike(expected, found)

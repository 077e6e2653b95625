"""TorchScript inside a region: compiled code in both passes, or none."""

from __future__ import annotations

import types
import warnings
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from oracle import Ran, assert_bitwise
from several import each
from torch import Tensor, nn
from torch.distributed._composable import checkpoint as composable
from torch.nn import functional
from torch.utils import checkpoint as torchs

import reactivate
from reactivate import dropin, policies
from reactivate._passes.observing import observed_by
from reactivate.errors import UnsupportedError

BIAS_GELU = """
def bias_gelu(x, bias):
    y = x + bias
    return y * 0.5 * (1.0 + torch.tanh(0.79788456 * y * (1 + 0.044715 * y * y)))
"""
# Batch size 1, with which what TorchScript saves before and after it compiles has the same shapes in another order.
SHAPES = [(1, 16), (1, 16), (3, 16), (1, 16), (2, 3, 16), (16,), (1, 1, 16), (5, 16), (1, 16)]


def new_bias_gelu() -> Any:
    """One that TorchScript has not seen yet."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.CompilationUnit(BIAS_GELU).bias_gelu


def warmed_up() -> Any:
    fused = new_bias_gelu()
    for _ in range(2):
        fused(torch.randn(2, 4, requires_grad=True), torch.randn(4, requires_grad=True)).sum().backward()
    return fused


def in_a_closure(fused: Any) -> Callable[..., Tensor]:
    return lambda x, bias: fused(x.sin(), bias).cos()


def in_an_attribute(fused: Any) -> Callable[..., Tensor]:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.activation = fused

        def forward(self, x: Tensor, bias: Tensor) -> Tensor:
            return self.activation(x.sin(), bias).cos()

    return Block()


def by_a_helper_of_another_module(fused: Any) -> Callable[..., Tensor]:
    source = "def helper(x, bias):\n    return fusions.bias_gelu(x, bias)"
    fusions, library, user = (types.ModuleType(name) for name in ("fusions", "library", "user"))
    fusions.bias_gelu = fused
    library.fusions = fusions
    exec(source, vars(library))
    user.library = library
    exec("def block(x, bias):\n    return library.helper(x.sin(), bias).cos()", vars(user))
    return user.block


def in_a_custom_function(fused: Any) -> Callable[..., Tensor]:
    """As Megatron fuses a linear layer with what follows: the scripted code differentiates inside of the function."""
    source = types.ModuleType("source")
    source.fused, source.torch = fused, torch
    exec(
        "class Fused(torch.autograd.Function):\n"
        "    @staticmethod\n"
        "    def forward(ctx, x, bias):\n"
        "        ctx.save_for_backward(x, bias)\n"
        "        return fused(x, bias)\n"
        "    @staticmethod\n"
        "    def backward(ctx, grad):\n"
        "        x, bias = (saved.detach().requires_grad_() for saved in ctx.saved_tensors)\n"
        "        with torch.enable_grad():\n"
        "            y = fused(x, bias)\n"
        "        return torch.autograd.grad(y, (x, bias), grad)\n"
        "def block(x, bias):\n"
        "    return Fused.apply(x.sin(), bias).cos()\n",
        vars(source),
    )
    return source.block


REACHES = [in_a_closure, in_an_attribute, by_a_helper_of_another_module, in_a_custom_function]


def train(fn: Callable[..., Tensor]) -> tuple[list[Tensor], Ran]:
    torch.manual_seed(0)
    bias, found, ran = torch.randn(16, requires_grad=True), [], Ran()
    with observed_by(ran):
        for shape in SHAPES:
            x = torch.randn(shape, requires_grad=True)
            out = fn(x, bias)
            out.square().sum().backward()
            found += [out.detach(), x.grad, bias.grad.clone()]
    return found, ran


def assert_same(one: list[Tensor], other: list[Tensor]) -> None:
    for index, (first, second) in enumerate(zip(one, other, strict=True)):
        assert_bitwise(first, second, f"result {index % 3} of step {index // 3}")


@pytest.mark.parametrize("reach", REACHES, ids=lambda reach: reach.__name__)
def test_compiled(reach: Callable[[Any], Callable[..., Tensor]]) -> None:
    plain, _ = train(reach(warmed_up()))
    ours, ran = train(reactivate.checkpoint(reach(warmed_up())))
    assert_same(plain, ours)
    assert ran.regions == ran.recomputations == len(SHAPES)


@pytest.mark.parametrize("reach", REACHES, ids=lambda reach: reach.__name__)
def test_not_compiled_yet(reach: Callable[[Any], Callable[..., Tensor]]) -> None:
    plain, _ = train(reach(new_bias_gelu()))
    with pytest.warns(UserWarning, match="scripted `bias_gelu` is not compiled yet") as caught:
        ours, ran = train(reactivate.checkpoint(reach(new_bias_gelu())))
    assert len([item for item in caught if "bias_gelu" in str(item.message)]) == 1
    assert_same(plain, ours)
    assert ran.regions == ran.recomputations == len(SHAPES) - 1, "the first one kept its activations"


def test_not_compiled_yet_where_it_is_not_found() -> None:
    fused = new_bias_gelu()

    def fn(x: Tensor, bias: Tensor) -> Tensor:
        found = HIDDEN.get()
        HIDDEN.put(found)
        return found(x.sin(), bias).cos()

    HIDDEN.put(fused)
    x, bias = torch.randn(1, 16, requires_grad=True), torch.randn(16, requires_grad=True)
    with pytest.raises(UnsupportedError, match="scripted function ran for the first time.*Call the scripted function"):
        reactivate.checkpoint(fn)(x, bias)
    ours = torch.autograd.grad(reactivate.checkpoint(fn)(x, bias).sum(), x)
    assert_same(list(ours), list(torch.autograd.grad(fn(x, bias).sum(), x)))


HIDDEN: SimpleQueue[Any] = SimpleQueue()


def test_two_microbatches_of_which_the_first_is_not_compiled() -> None:
    """Between the first forward pass and its backward TorchScript compiles."""

    def once(wrap: Callable[[Any], Any]) -> list[Tensor]:
        torch.manual_seed(0)
        fused = new_bias_gelu()
        fn = wrap(lambda x, bias: fused(x.sin(), bias).cos())
        bias, xs = torch.randn(16, requires_grad=True), [torch.randn(1, 16, requires_grad=True) for _ in range(3)]
        outs = [fn(x, bias) for x in xs]
        for out in outs:
            out.square().sum().backward()
        return [bias.grad, *(x.grad for x in xs)]

    with pytest.warns(UserWarning, match="bias_gelu"):
        ours = once(reactivate.checkpoint)
    assert_same(once(lambda fn: fn), ours)


def test_nested_regions_before_it_is_compiled() -> None:
    def once(wrap: Callable[[Any], Any]) -> list[Tensor]:
        fused = new_bias_gelu()
        inner = wrap(lambda x, bias: fused(x.sin(), bias).cos())
        return train(wrap(lambda x, bias: inner(inner(x, bias), bias).sin()))[0]

    with pytest.warns(UserWarning, match="bias_gelu"):
        ours = once(reactivate.checkpoint)
    assert_same(once(lambda fn: fn), ours)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_scripted_module_with_batch_norm() -> None:
    """Its buffers live in C++: the recomputation writes the old statistics into them, and the new ones back."""

    def once(wrap: Callable[[Any], Any]) -> list[Tensor]:
        torch.manual_seed(0)
        module = torch.jit.script(nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Tanh()))
        for _ in range(2):
            module(torch.randn(4, 16))
        fn, xs = wrap(module), [torch.randn(8, 16, requires_grad=True) for _ in range(3)]
        outs = [fn(x) for x in xs]
        for out in outs:
            out.square().sum().backward()
        return [*(x.grad for x in xs), *(buffer for _, buffer in module.named_buffers())]

    assert_same(once(lambda fn: fn), once(reactivate.checkpoint))


class Head(nn.Module):
    """With a loss of its own, so that a policy may compute that by rows."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)) for _ in range(3)))
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return functional.cross_entropy(self.head(self.blocks(x)).float(), torch.zeros(5, dtype=torch.long))


class InTorchs(Head):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torchs.checkpoint(block, x, use_reentrant=False)
        return self.head(x).sum()


def applied(policy: Any) -> Callable[[Any], Any]:
    def wrap(model: nn.Module) -> nn.Module:
        reactivate.apply(model, policy(model) if callable(policy) else policy)
        return model

    return wrap


def planned(**settings: Any) -> Callable[[Any], Any]:
    return applied(lambda model: reactivate.plan(model, torch.randn(5, 8), loss=None, budget="100%", **settings))


def composed(model: Head) -> Head:
    for block in model.blocks:
        composable(block)
    return model


@pytest.mark.usefixtures("whole_heap")
@each(
    ("make", "wrap"),
    [
        (Head, reactivate.checkpoint),
        (Head, applied(lambda _: policies.full())),
        (Head, applied(lambda _: policies.full(save=["linear"]))),
        (Head, applied(lambda _: policies.recompute_modules("blocks[0:2]"))),
        (Head, applied(lambda _: policies.first_match(policies.full(), policies.loss_by_rows("head")))),
        (Head, planned()),
        (Head, planned(shapes="adaptive")),
        (InTorchs, lambda model: model),
        (Head, composed),
    ],
)
def test_traced_by_torchscript(make: Callable[[], Any], wrap: Callable[[Any], Any]) -> None:
    """`torch.jit.trace` records the ops of a region, as it does those of torch's checkpoint; no region begins."""

    def results(wrap: Callable[[Any], Any], regions: Ran) -> list[Tensor]:
        torch.manual_seed(0)
        x, model = torch.randn(5, 8), wrap(make())
        with observed_by(regions):
            traced = torch.jit.trace(model, (x,))
        result = traced(x)
        return [result.detach(), *torch.autograd.grad(result, list(traced.parameters()))]

    ran = Ran()
    plain = results(lambda model: model, Ran())
    with dropin.install():
        ours = results(wrap, ran)
    assert not ran.regions
    for expected, found in zip(plain, ours, strict=True):
        assert_bitwise(expected, found, "result or gradient")

"""Rule 1, over functions and modules of every shape."""

from __future__ import annotations

import functools
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from oracle import Case, check, leaf
from several import each
from torch import Tensor, nn

import reactivate


@dataclass
class Pair:
    hidden: Tensor
    scale: float
    rest: Any = None


@dataclass(frozen=True, slots=True)
class Frozen:
    hidden: Tensor
    mask: Tensor


Point = namedtuple("Point", ["x", "y"])


class Holder:
    """A plain object that carries tensors."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


def keyword_and_nested() -> Case:
    def fn(x: Tensor, *, mask: Tensor, rest: dict[str, Any]) -> Tensor:
        first, (second, scale) = rest["pair"]
        return ((x * mask).exp() * first).sin() + (second.sigmoid() * scale if rest["flag"] else x)

    rest = {"pair": [leaf(4, 8), (leaf(4, 8), 0.5)], "flag": True, "nothing": None}
    return Case(fn, (leaf(4, 8),), {"mask": torch.rand(4, 8), "rest": rest})


def dataclasses_and_objects() -> Case:
    def fn(pair: Pair, frozen: Frozen, point: Any, holder: Holder) -> Pair:
        hidden = (pair.hidden * pair.scale).exp().sin() * frozen.hidden.sigmoid() * frozen.mask
        return Pair((hidden * point.x.cos() + holder.table["w"].exp()).tanh(), 1.0, [point.y.sin().exp()])

    args = (
        Pair(leaf(4, 8), 0.3),
        Frozen(leaf(4, 8), torch.rand(4, 8)),
        Point(leaf(4, 8), leaf(4, 8)),
        Holder(table={"w": leaf(4, 8)}, name="h"),
    )
    return Case(fn, args)


def ordered_dict() -> Case:
    def fn(inputs: OrderedDict[str, Tensor]) -> OrderedDict[str, Tensor]:
        return OrderedDict((name, value.sin().exp().cos()) for name, value in inputs.items())

    return Case(fn, (OrderedDict(b=leaf(3, 5), a=leaf(3, 5)),))


def mixed_outputs() -> Case:
    def fn(x: Tensor, y: Tensor) -> Any:
        h = x.sin().exp()
        return {"h": h, "view": h[1:], "input": y, "none": None, "text": "a", "detached": h.detach() * 2, "n": 3}

    return Case(fn, (leaf(6, 8), leaf(6, 8)))


def closure() -> Case:
    weight, table = leaf(16, 16), torch.randn(16)
    return Case(lambda x: ((x @ weight).tanh() * table).exp(), (leaf(8, 16),), leaves={"weight": weight})


def closure_in_closure() -> Case:
    weight = leaf(16, 16)

    def project(x: Tensor) -> Tensor:
        return (x @ weight).sin()

    return Case(lambda x: project(project(x).exp()).cos(), (leaf(8, 16),), leaves={"weight": weight})


def partial_with_tensors() -> Case:
    weight, bias = leaf(16, 16), leaf(16)

    def fn(w: Tensor, x: Tensor, b: Tensor) -> Tensor:
        return F.relu(x @ w + b).exp().sin()

    return Case(functools.partial(fn, weight, b=bias), (leaf(8, 16),), leaves={"weight": weight, "bias": bias})


def defaults_with_tensors() -> Case:
    weight = leaf(16, 16)

    def fn(x: Tensor, w: Tensor = weight, *, b: Tensor = weight) -> Tensor:
        return (x @ w).sin() @ b.exp()

    return Case(fn, (leaf(8, 16),), leaves={"weight": weight})


def method_of_a_tensor() -> Case:
    x = leaf(8, 16)
    return Case(x.exp, (), leaves={"x": x})


def method_of_an_object() -> Case:
    class Layer:
        def __init__(self) -> None:
            self.weight = leaf(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            return (x @ self.weight).sin().exp()

    layer = Layer()
    return Case(layer.forward, (leaf(8, 16),), leaves={"weight": layer.weight})


def module_method() -> Case:
    block = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
    return Case(block.forward, (leaf(8, 16),), modules=[block])


def module_in_closure() -> Case:
    block = nn.Sequential(nn.Linear(16, 64), nn.Dropout(0.5), nn.GELU(), nn.Linear(64, 16))
    return Case(lambda x: block(x).sin() + x, (leaf(8, 16),), modules=[block])


def parameters_only() -> Case:
    block = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
    return Case(block, (torch.randn(8, 16),))


def frozen_first_layer() -> Case:
    block = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 16))
    block[0].requires_grad_(False)
    return Case(block, (torch.randn(8, 16),))


def attention() -> Case:
    block = nn.MultiheadAttention(16, 4, dropout=0.1, batch_first=True)
    x = leaf(2, 8, 16)
    return Case(block, (x, x, x), {"need_weights": False})  # the same tensor thrice: it takes another path then


def convolution() -> Case:
    block = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout2d())
    return Case(block, (leaf(2, 3, 12, 12),))


def in_place_inside() -> Case:
    def fn(x: Tensor) -> Tensor:
        h = x.sin()
        h.mul_(2).add_(x)
        y = h.exp()
        z = torch.zeros(8, 16)
        z[:4] = y[:4]
        return (y + z).cos()

    return Case(fn, (leaf(8, 16),))


def in_place_relu() -> Case:
    return Case(
        nn.Sequential(nn.Linear(16, 16), nn.ReLU(inplace=True), nn.Linear(16, 16), nn.SiLU(inplace=True)),
        (leaf(8, 16),),
    )


def double_precision_and_integers() -> Case:
    def fn(x: Tensor, index: Tensor) -> Tensor:
        return (x.double()[index].exp() / 3).float().sin()

    return Case(fn, (leaf(8, 16), torch.tensor([0, 3, 3, 7])))


def complex_numbers() -> Case:
    def fn(x: Tensor) -> Tensor:
        z = torch.complex(x, x.sin())
        return torch.fft.fft(z * z.conj().exp()).abs()

    return Case(fn, (leaf(8, 16),))


PROBLEMS: dict[str, Callable[[], Case]] = {
    "function": lambda: Case(lambda x: (x.sin() * x.exp()).tanh(), (leaf(8, 16),)),
    "two_inputs": lambda: Case(lambda x, w: F.gelu(x @ w).softmax(-1), (leaf(8, 16), leaf(16, 32))),
    "keyword_and_nested": keyword_and_nested,
    "dataclasses_and_objects": dataclasses_and_objects,
    "ordered_dict": ordered_dict,
    "mixed_outputs": mixed_outputs,
    "view_of_input": lambda: Case(lambda x: (x.t(), x[1:].sin().exp()), (leaf(6, 8),)),
    "closure": closure,
    "closure_in_closure": closure_in_closure,
    "partial_with_tensors": partial_with_tensors,
    "defaults_with_tensors": defaults_with_tensors,
    "method_of_a_tensor": method_of_a_tensor,
    "method_of_an_object": method_of_an_object,
    "module": lambda: Case(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16), nn.Tanh()), (leaf(8, 16),)),
    "module_method": module_method,
    "module_in_closure": module_in_closure,
    "parameters_only": parameters_only,
    "frozen_first_layer": frozen_first_layer,
    "attention": attention,
    "transformer_layer": lambda: Case(
        nn.TransformerEncoderLayer(16, 4, 64, dropout=0.1, batch_first=True), (leaf(2, 8, 16),)
    ),
    "recurrent": lambda: Case(nn.LSTM(16, 16, num_layers=2, dropout=0.2), (leaf(5, 2, 16),)),
    "convolution": convolution,
    "in_place_inside": in_place_inside,
    "in_place_relu": in_place_relu,
    "double_precision_and_integers": double_precision_and_integers,
    "complex_numbers": complex_numbers,
}


@pytest.mark.parametrize("determinism", ["metadata", "every", "none"])
@pytest.mark.parametrize("early_stop", [True, False], ids=["early_stop", "whole"])
@pytest.mark.parametrize("problem", PROBLEMS)
def test_bitwise(problem: str, early_stop: bool, determinism: Any) -> None:
    saves_memory = problem != "method_of_a_tensor"  # autograd keeps its one result, the region its one input
    check(PROBLEMS[problem], early_stop=early_stop, check=determinism, saves_memory=saves_memory)


@each("problem", PROBLEMS)
def test_verify_agrees(problem: str) -> None:
    case = PROBLEMS[problem]()
    verdict = reactivate.verify(case.fn, case.args, case.kwargs)
    assert verdict, verdict
    assert verdict.regions == verdict.recomputations == 1


def test_decorator_with_and_without_options() -> None:
    @reactivate.checkpoint
    def first(x: Tensor) -> Tensor:
        """First."""
        return x.sin().exp()

    @reactivate.checkpoint(name="second", early_stop=False)
    def second(x: Tensor) -> Tensor:
        return x.sin().exp()

    x = leaf(3)
    for fn in (first, second):
        (grad,) = torch.autograd.grad(fn(x).sum(), x)
        assert torch.equal(grad, torch.autograd.grad(x.sin().exp().sum(), x)[0])
    assert first.__name__ == "first" and first.__doc__ == "First."


def test_decorated_method() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(8, 8), nn.Dropout(), nn.GELU())

        @reactivate.checkpoint
        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x).sin()

    class Plain(Block):
        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x).sin()

    torch.manual_seed(0)
    block, x = Block(), leaf(4, 8)
    plain = Plain()
    plain.load_state_dict(block.state_dict())
    grads = []
    for model in (block, plain):
        torch.manual_seed(1)
        grads.append(torch.autograd.grad(model(x).sum(), [x, *model.parameters()]))
    assert all(torch.equal(one, other) for one, other in zip(*grads))

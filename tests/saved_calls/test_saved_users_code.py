"""Saved calls of torch's functions and modules in which code of the user's runs: of a subclass, a mode, a `forward`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import MethodType
from typing import Any

import pytest
import torch
from several import each
from state_programs import Program, Wrap, backward, check_program
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

import reactivate
from reactivate import policies
from reactivate._passes.observing import observed_by

STEPS = 3  # the third call is not compared
POLICIES = {
    "op": policies.save_ops("linear", "conv1d", "softplus"),
    "intensive": policies.compute_intensive(),
    "modules": policies.save_modules("first", "conv"),
}


class Model(nn.Module):
    """Two saved calls, and behind them what reads random numbers and state that code in these may change."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.conv, self.dropout = nn.Linear(4, 4), nn.Conv1d(3, 3, 1), nn.Dropout(0.5)
        self.count, self.log = 0, [0]

    def forward(self, x: Tensor) -> Tensor:
        y = F.softplus(self.conv(self.first(x).sin()).sin())
        return self.dropout(y).sin() * (1 + self.count) * len(self.log)


def draw(model: Model) -> Tensor:
    return torch.rand(())


def count(model: Model) -> Tensor:
    model.count += 1
    model.log.append(1)
    return torch.ones(())


Act = Callable[[Model], Tensor]


def weight_of(model: Model, act: Act) -> type[Tensor]:
    class Weight(Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = super().__torch_function__(func, types, args, kwargs or {})
            return result.as_subclass(Tensor) + act(model) if func in (F.linear, F.conv1d) else result

    return Weight


def subclass(model: Model, act: Act) -> None:
    kind = weight_of(model, act)
    for module in (model.first, model.conv):
        module.weight = nn.Parameter(module.weight.detach().as_subclass(kind))


def no_parameters(model: Model, act: Act) -> None:
    kind = weight_of(model, act)
    weights = [module.weight.detach().as_subclass(kind).requires_grad_() for module in (model.first, model.conv)]
    del model.first.weight, model.conv.weight
    model.first.register_buffer("weight", weights[0])
    model.conv.weight = weights[1]  # an attribute


class InWrapper(Tensor):
    """A tensor of the user's inside of a wrapper of torch's."""

    @staticmethod
    def __new__(cls, inner: Tensor, act: Callable[[], Tensor]) -> InWrapper:
        return Tensor._make_wrapper_subclass(cls, inner.shape, inner.stride(), dtype=inner.dtype)

    def __init__(self, inner: Tensor, act: Callable[[], Tensor]) -> None:
        self.inner, self.act = inner, act

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = next(item for item in tree_leaves((args, kwargs)) if isinstance(item, cls))
        plainly = lambda item: item.inner if isinstance(item, cls) else item  # noqa: E731
        result = func(*tree_map(plainly, args), **tree_map(plainly, kwargs or {}))
        if func in (torch.ops.aten.addmm.default, torch.ops.aten.convolution.default):
            result = result + found.act()
        return tree_map_only(Tensor, lambda item: cls(item, found.act), result)


def in_wrapper(model: Model, act: Act) -> None:
    for module in (model.first, model.conv):
        weight = module.weight.detach()
        both = TwoTensor(weight, InWrapper(weight, partial(act, model)))
        module.weight = nn.Parameter(both)


class Duck:
    """An object that torch's functions take for a tensor, and is none."""

    def __init__(self, weight: Tensor, act: Callable[[], Tensor]) -> None:
        self.weight, self.act = weight, act

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        x, self, *rest = args
        return func(x, self.weight, *rest, **(kwargs or {})) + self.act()


def duck(model: Model, act: Act) -> None:
    for module in (model.first, model.conv):
        weight = module.weight
        del module.weight
        module.weight = Duck(weight, partial(act, model))


class Proxy:
    """An object in the place of a module: its weight is asked for with an effect."""

    def __init__(self, module: nn.Module, act: Callable[[], Tensor]) -> None:
        self.module, self.act, self.bias = module, act, module.bias

    @property
    def weight(self) -> Tensor:
        return self.module.weight + self.act()


def proxy(model: Model, act: Act) -> None:
    model.first.forward = MethodType(nn.Linear.forward, Proxy(model.first, partial(act, model)))


def forwards(model: Model, act: Act) -> None:
    def replaced(forward: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda x: forward(x) + act(model)

    model.first.forward = replaced(model.first.forward)
    model.conv._conv_forward = lambda x, *rest: nn.Conv1d._conv_forward(model.conv, x, *rest) + act(model)


def function_mode(model: Model, act: Act) -> AbstractContextManager[Any]:
    class Mode(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            return result + act(model) if func in (F.linear, torch.conv1d, F.softplus) else result

    return Mode()


def dispatch_mode(model: Model, act: Act) -> AbstractContextManager[Any]:
    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            return (
                result + act(model)
                if func in (torch.ops.aten.addmm.default, torch.ops.aten.softplus.default)
                else result
            )

    return Mode()


WAYS: dict[str, Callable[[Model, Act], AbstractContextManager[Any] | None]] = {
    "subclass": subclass,
    "no parameters": no_parameters,
    "in a wrapper": in_wrapper,
    "duck": duck,
    "forwards": forwards,
    "proxy": proxy,
    "function mode": function_mode,
    "dispatch mode": dispatch_mode,
}


@each("way", WAYS, ids=str)
@pytest.mark.parametrize("act", [draw, count])
def test_what_it_does_is_done_once(way: str, act: Act) -> None:
    def train(policy: Any, wrap: Wrap) -> Any:
        model, found = Model(), []
        mode = WAYS[way](model, act) or nullcontext()
        checkpointed = wrap(model, policy=policy)
        for _ in range(STEPS):
            model.zero_grad()
            with mode:
                y = checkpointed(torch.randn(2, 3, 4))
            backward(y)
            found += [y.detach(), *[parameter.grad for parameter in model.parameters()], model.count, len(model.log)]
        return found

    for policy in POLICIES.values():
        check_program(Program(partial(train, policy), recomputations=STEPS))


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_calls_in_which_it_has_no_effect_are_left_out(policy: Any) -> None:
    calls: list[Any] = []

    class Seen:
        def forward_done(self, region: Any) -> None:
            calls.extend(region.saved_calls)

        def recomputation_done(self, region: Any) -> None: ...

    model = Model()
    subclass(model, lambda model: torch.ones(()))
    with observed_by(Seen()), function_mode(model, lambda model: torch.ones(())):
        reactivate.checkpoint(model, policy=policy)(torch.randn(2, 3, 4)).sum().backward()
    assert calls and all(call.reason is None for call in calls), calls


def test_statistics_that_an_op_moves_under_a_mode_are_moved_again() -> None:
    def train(wrap: Wrap) -> Any:
        def forward(x: Tensor) -> Tensor:
            mean, variance = torch.zeros(4), torch.ones(4)
            y = F.batch_norm(x.sin(), mean, variance, training=True)
            return y.sin() * (mean.sin() + variance).exp()

        found, checkpointed = [], wrap(forward, policy=policies.save_ops("batch_norm"))
        for _ in range(STEPS):
            x = torch.randn(5, 4, requires_grad=True)
            with function_mode(Model(), draw):
                y = checkpointed(x)
            backward(y)
            found += [y.detach(), x.grad]
        return found

    check_program(Program(train, recomputations=STEPS))


class Doubled(nn.Linear):
    """A class that a linear layer gets while it is trained."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias) * 2


def test_a_saved_module_may_get_another_class() -> None:
    def train(wrap: Wrap) -> Any:
        model, found = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), []
        checkpointed = wrap(model, policy=policies.save_modules("0"))
        for step in range(STEPS):
            if step == 1:
                model[0].__class__ = Doubled
            model.zero_grad()
            y = checkpointed(torch.randn(3, 4, requires_grad=True))
            backward(y)
            found += [y.detach(), *[parameter.grad for parameter in model.parameters()]]
        return found

    check_program(Program(train, recomputations=STEPS))

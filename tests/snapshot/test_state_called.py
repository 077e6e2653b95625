"""State that only methods read which code calls without naming them: operators, protocols, and what torch calls by itself."""

from __future__ import annotations

import copy
import logging
import math
import operator
import os
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any

import torch
from state_programs import Programs, Wrap, leaf
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

PROGRAMS = Programs()
test_program = PROGRAMS.test()
STEPS = 6

calls = [0]  # what the classes at module level count


def counted() -> float:
    """Count a call, and return a factor that differs from call to call, but not in those that the self-check compares."""
    calls[0] += 1
    return 0.5 if calls[0] in (3, 5, 6) else 1.0


def trained(wrap: Wrap, fn: Callable[[Tensor], Tensor]) -> Any:
    """Train a layer in front of `fn`, which counts its calls."""
    calls[0] = 0
    linear, found = nn.Linear(3, 3), []
    checkpointed = wrap(lambda x: fn(linear(x)).sin().exp())
    for _ in range(STEPS):
        linear.zero_grad()
        checkpointed(torch.randn(2, 3)).sum().backward()
        found.append(linear.weight.grad)
    return found, calls[0]


# -- special methods ---------------------------------------------------------------------------------------------------

IN_PLACE = ("imod", "ipow", "imatmul", "ifloordiv", "ixor", "iand", "ior", "ilshift", "irshift", "itruediv", "isub")
FROM_THE_LEFT = ("lshift", "rshift", "floordiv", "mod", "pow", "matmul", "and_", "or_", "xor", "truediv", "sub")


def counts_in(name: str, result: Callable[[Any], Any]) -> type:
    """Return a class with one method, which counts its calls."""

    def method(self: Any, *args: Any) -> Any:
        self.factor = counted()
        return result(self)

    return type("Counting", (), {f"__{name}__": method})


def factor_of(counting: type, operation: Callable[[Any], Any]) -> Callable[[Tensor], Tensor]:
    """Return a function that scales by what an operation on a new object has counted."""

    def scaled(x: Tensor) -> Tensor:
        counter = counting()
        operation(counter)
        return x * counter.factor

    return scaled


def itself(item: Any) -> Any:
    return item


def operation_of(name: str) -> Callable[[Any], Any]:
    return lambda item: getattr(operator, name)(item, 1)


def reflected(name: str) -> Callable[[Any], Any]:
    return lambda item: getattr(operator, name)(1, item)


OPERATIONS: dict[str, tuple[str, Callable[[Any], Any], Callable[[Any], Any]]] = {
    **{name: (name.strip("_"), operation_of(name), itself) for name in (*IN_PLACE, *FROM_THE_LEFT)},
    **{f"r{name}": (f"r{name}", reflected(name), itself) for name in FROM_THE_LEFT[:5]},
    "divmod": ("divmod", lambda item: divmod(item, 1), itself),
    "rdivmod": ("rdivmod", lambda item: divmod(1, item), itself),
    "floor": ("floor", math.floor, itself),
    "ceil": ("ceil", math.ceil, itself),
    "trunc": ("trunc", math.trunc, itself),
    "bytes": ("bytes", bytes, lambda _: b""),
    "fspath": ("fspath", os.fspath, lambda _: ""),
    "copy": ("copy", copy.copy, itself),
    "deepcopy": ("deepcopy", copy.deepcopy, itself),
    "dir": ("dir", dir, lambda _: []),
    "length_hint": ("length_hint", operator.length_hint, lambda _: 0),
}


def special_method(wrap: Wrap, name: str, operation: Callable[[Any], Any], result: Callable[[Any], Any]) -> Any:
    return trained(wrap, factor_of(counts_in(name, result), operation))


PROGRAMS.rows(special_method, OPERATIONS, recomputations=STEPS)


@PROGRAMS.right
def awaited(wrap: Wrap) -> Any:
    class Factor:
        def __await__(self) -> Iterator[Any]:
            self.factor = counted()
            return iter(())

        async def __aenter__(self) -> None:
            self.factor = counted()

        async def __aexit__(self, *error: object) -> None:
            self.factor = counted()

    def scaled(x: Tensor) -> Tensor:
        factor = Factor()

        async def wait() -> Tensor:
            await factor
            async with factor:
                return x * factor.factor

        try:
            wait().send(None)
        except StopIteration as end:
            return end.value
        raise AssertionError

    return trained(wrap, scaled)


@PROGRAMS.right
def property_of_a_pattern(wrap: Wrap) -> Any:
    class Point:
        __match_args__ = ("factor",)

        @property
        def factor(self) -> float:
            return counted()

    def scaled(x: Tensor) -> Tensor:
        match Point():
            case Point(factor):
                return x * factor
        raise AssertionError

    return trained(wrap, scaled)


class Kind(Enum):
    KNOWN = 1

    @classmethod
    def _missing_(cls, value: object) -> Kind:
        calls[0] += 1
        return cls.KNOWN


@PROGRAMS.right
def member_that_is_missing(wrap: Wrap) -> Any:
    return trained(wrap, lambda x: x * Kind(calls[0] + 2).value)


# -- what torch calls --------------------------------------------------------------------------------------------------


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * counted()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def counting_function(count: list[int], *, in_context: bool) -> Any:
    """Return a custom function that counts the calls of its forward, or those of `setup_context`, in a closure."""

    class Counting(torch.autograd.Function):
        @staticmethod
        def forward(x: Tensor) -> Tensor:
            count[0] += not in_context
            return x * (2.0 if count[0] in (3, 5, 6) else 1.0)

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            count[0] += in_context

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient

    return Counting


def in_a_closure(wrap: Wrap, in_context: bool) -> Any:
    count = [0]
    function = counting_function(count, in_context=in_context)
    return trained(wrap, lambda x: function.apply(x)), count


def bound_apply(wrap: Wrap) -> Any:
    count = [0]
    apply = counting_function(count, in_context=False).apply
    return trained(wrap, lambda x: apply(x)), count


def in_a_dict(wrap: Wrap) -> Any:
    functions = {"scaled": Scaled}
    return trained(wrap, lambda x: functions["scaled"].apply(x))


PROGRAMS.rows(
    in_a_closure, {"forward_of_a_function": (False,), "setup_context_of_a_function": (True,)}, recomputations=STEPS
)
PROGRAMS.rows(bound_apply, {"apply_of_a_function": ()}, recomputations=STEPS)
PROGRAMS.rows(in_a_dict, {"function_in_a_dict": ()}, recomputations=STEPS)


class Activation(nn.Module):
    """Counts at module level."""

    def forward(self, x: Tensor) -> Tensor:
        return x * counted()


@PROGRAMS.right
def module_made_inside(wrap: Wrap) -> Any:
    return trained(wrap, lambda x: nn.Sequential(Activation(), nn.Tanh())(x))


@PROGRAMS.right
def module_of_a_closure_made_inside(wrap: Wrap) -> Any:
    count = [0]

    class Counting(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return self.scaled(x)

        def scaled(self, x: Tensor) -> Tensor:
            count[0] += 1
            return x * (2.0 if count[0] in (3, 5, 6) else 1.0)

    return trained(wrap, lambda x: Counting()(x)), count


@PROGRAMS.right
def parametrization_made_inside(wrap: Wrap) -> Any:
    def scaled(x: Tensor) -> Tensor:
        linear = nn.Linear(3, 3, bias=False)
        nn.init.eye_(linear.weight)
        parametrize.register_parametrization(linear, "weight", Activation())
        return linear(x)

    return trained(wrap, scaled)


class CountingMode(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        return found * counted() if func is torch.tanh else found


class CountingDispatch(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        return found * counted() if func is torch.ops.aten.tanh.default else found


def mode_made_inside(wrap: Wrap, mode: type) -> Any:
    def scaled(x: Tensor) -> Tensor:
        with mode():
            return torch.tanh(x)

    return trained(wrap, scaled)


MODES = {"function_mode_made_inside": (CountingMode,), "dispatch_mode_made_inside": (CountingDispatch,)}
PROGRAMS.rows(mode_made_inside, MODES, recomputations=STEPS)


class Counted(type):
    """Counts what is written to its classes, and refuses questions."""

    writes = 0

    def __setattr__(cls, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        type.__setattr__(Counted, "writes", Counted.writes + 1)

    def __getattr__(cls, name: str) -> Any:
        raise RuntimeError(name)


@PROGRAMS.right
def metaclass_with_methods(wrap: Wrap) -> Any:
    class Last(metaclass=Counted):
        value = 0.0

    held = Last()

    def scaled(x: Tensor) -> Tensor:
        Last.value = counted()
        return x * Last.value if held is not None else x

    before = Counted.writes
    return trained(wrap, scaled), Counted.writes - before


# -- what the standard library calls -----------------------------------------------------------------------------------


@PROGRAMS.right
def handler_of_logging(wrap: Wrap) -> Any:
    class Counting(logging.Handler):
        def __init__(self) -> None:
            super().__init__()
            self.number = 0

        def emit(self, record: logging.LogRecord) -> None:
            self.number += 1

    logger, handler = logging.getLogger("counted"), Counting()
    logger.setLevel(logging.INFO)
    logger.propagate = False
    logger.addHandler(handler)

    def scaled(x: Tensor) -> Tensor:
        logger.info("a step")
        return x.sin() * handler.number

    try:
        return trained(wrap, scaled), handler.number
    finally:
        logger.removeHandler(handler)


# -- modes around a region --------------------------------------------------------------------------------------------


class CountingFunctions(TorchFunctionMode):
    """Counts the calls of a layer, scales what comes out by that, and notes what it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.names = 0, []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.__name__)
        result = func(*args, **(kwargs or {}))
        if func is not nn.functional.linear:
            return result
        self.count += 1
        return result * (1 + self.count / 8)


class CountingOps(TorchDispatchMode):
    """Does the same with ops."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.names = 0, []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten.detach.default:  # of a result that an op saves: see docs/limits.md
            self.names.append(str(func))
        result = func(*args, **(kwargs or {}))
        if func is not torch.ops.aten.addmm.default:
            return result
        self.count += 1
        return result * (1 + self.count / 8)


def _under(mode: Any, wrap: Wrap) -> Any:
    region, found = wrap(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh())), []
    for _ in range(STEPS):
        x = leaf(5, 4)
        with mode:
            out = region(x)
        out.square().sum().backward()
        found += [x.grad, mode.count, [*mode.names]]
    return found


@PROGRAMS.right
def function_mode_that_counts(wrap: Wrap) -> Any:
    return _under(CountingFunctions(), wrap)


@PROGRAMS.right
def dispatch_mode_that_counts(wrap: Wrap) -> Any:
    return _under(CountingOps(), wrap)

"""The interpreter of `programs`: its ops, its modules, and how they run, plain or in regions."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch
import torch.nn.functional as F
from programs import WAYS, Op, Program, Region, Step, Use, Within, Write, at
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

SIZE = 4
Body = Callable[[list[Tensor]], Any]
Wrap = Callable[[Callable[..., Any], Sequence[Tensor]], Callable[..., Any]]
"""(a region's function, the tensors that it reads) -> what to call in its place."""


# -- words of the language --------------------------------------------------------------------------------------------


class Bulk(torch.autograd.Function):
    """Saves an input twice, nothing, and its output; reads them twice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        out = (x * y).sin()
        ctx.save_for_backward(x, None, y, x, out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, _, y, _, out = ctx.saved_tensors
        again = ctx.saved_tensors[3]
        slope = (again * y).cos() + 0 * out
        return grad * slope * y, grad * slope * x


def inner_gradient(x: Tensor, y: Tensor) -> Tensor:
    """A backward inside of the forward pass."""
    if not (torch.is_grad_enabled() and x.requires_grad and y.requires_grad):
        return x.detach()
    (found,) = torch.autograd.grad(x.float().sum(), y, retain_graph=True, allow_unused=True)
    return x.detach() if found is None else found


def hooked(x: Tensor) -> Tensor:
    """A copy with a hook: to put one on a view whose base was written to crashes torch 2.13."""
    copy = x.clone()
    if copy.requires_grad:
        copy.register_hook(lambda grad: grad * 0.5)
    return copy


OPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sin": lambda x, y: x.sin(),
    "exp": lambda x, y: x.tanh().exp(),
    "sigmoid": lambda x, y: x.sigmoid(),
    "softmax": lambda x, y: x.softmax(-1),
    "gelu": lambda x, y: F.gelu(x),
    "relu": lambda x, y: x.relu(),
    "norm": lambda x, y: F.layer_norm(x, (SIZE,)),
    "double": lambda x, y: (x.double().cos() / 3).float(),
    "add": lambda x, y: x + y,
    "mul": lambda x, y: x * y,
    "matmul": lambda x, y: x @ y.to(x.dtype),
    "where": lambda x, y: torch.where(x > 0, x, y),
    "index": lambda x, y: x[(y.argsort(-1))[0]],
    "bulk": Bulk.apply,
    "dropout": lambda x, y: F.dropout(x, 0.4),
    "noise": lambda x, y: x * torch.rand_like(x),
    "python": lambda x, y: x * random.gauss(0, 1),
    "numpy": lambda x, y: y * numpy.random.normal(),
    "transposed": lambda x, y: x.t(),
    "reshaped": lambda x, y: x.reshape(2, 2 * SIZE).view(SIZE, SIZE),
    "row": lambda x, y: x[1].expand(SIZE, SIZE),
    "chunks": lambda x, y: torch.cat(x.chunk(2)[::-1]),
    "detached": lambda x, y: x.detach(),
    "gradient": inner_gradient,
    "hooked": lambda x, y: hooked(x),
}

WRITES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "mul_": lambda x, y: x.mul_(y),
    "add_": lambda x, y: x.add_(y),
    "sin_": lambda x, y: x.sin_(),
    "relu_": lambda x, y: x.relu_(),
    "dropout_": lambda x, y: F.dropout(x, 0.4, inplace=True),
    "rows_": lambda x, y: x[1:3].mul_(y[1:3]),
    "assigned": lambda x, y: x.__setitem__(0, y[0]),
    "detached_": lambda x, y: x.detach().mul_(2),
}

CONTEXTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "no_grad": torch.no_grad,
    "enable_grad": torch.enable_grad,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}


class Counting(nn.Module):
    """Buffers that are read, written in place, and replaced."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.ones(SIZE, SIZE))
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        out = x * self.mean.clone() + self.steps
        with torch.no_grad():
            self.mean.lerp_(x.float(), 0.1)
            self.steps = self.steps + 1
        return out


MODULES: dict[str, Callable[[], nn.Module]] = {
    "Linear": lambda: nn.Linear(SIZE, SIZE),
    "BatchNorm": lambda: nn.BatchNorm1d(SIZE),
    "Dropout": lambda: nn.Dropout(0.4),
    "Counting": Counting,
    "SpectralNorm": lambda: spectral_norm(nn.Linear(SIZE, SIZE)),
    "Block": lambda: nn.Sequential(nn.Linear(SIZE, SIZE), nn.ReLU(inplace=True), nn.BatchNorm1d(SIZE), nn.Dropout(0.2)),
}


# -- running one ------------------------------------------------------------------------------------------------------


@dataclass
class World:
    """The state that a program runs in: made anew for each run."""

    program: Program
    leaves: dict[str, Tensor] = field(default_factory=dict)
    inputs: list[Tensor] = field(default_factory=list)
    modules: list[nn.Module] = field(default_factory=list)

    def __post_init__(self) -> None:
        for index, kind in enumerate(self.program.kinds):
            value = torch.randn(SIZE, SIZE, requires_grad=kind != "constant")
            if kind != "constant":
                self.leaves[f"x{index}"] = value
            self.inputs.append(value * 1 if kind == "computed" else value)
        self.modules = [MODULES[name]() for name in self.program.modules]
        for index, module in enumerate(self.modules):
            self.leaves |= {f"m{index}.{name}": parameter for name, parameter in module.named_parameters()}

    def forward(self, wrap: Wrap) -> Any:
        """The program's function, called with its inputs."""
        program, modules = self.program, self.modules

        def body(values: list[Tensor]) -> Any:
            pool = list(values)
            interpret(program.steps, pool, modules, wrap)
            differentiable = [value for value in pool if value.requires_grad]
            first, *rest = program.outputs
            return packed([at(differentiable or pool, first), *(at(pool, index) for index in rest)], program.container)

        with CONTEXTS[program.context]():
            return call(wrap, body, self.inputs, program.ways)


def interpret(steps: Sequence[Step], pool: list[Tensor], modules: list[nn.Module], wrap: Wrap) -> None:
    """Run `steps`, which add their values to `pool`."""
    count = len(pool)
    for step in steps:
        match step:
            case Op(name, first, second):
                pool.append(OPS[name](at(pool, first), at(pool, second)))
            case Write(name, target, other, anywhere):
                choice = pool if anywhere else pool[count:]
                if choice:
                    WRITES[name](at(choice, target), at(pool, other))
            case Use(module, value):
                if modules:
                    pool.append(at(modules, module)(at(pool, value).float()))
            case Within(context, values, inner):
                scope = [at(pool, value) for value in values]
                with CONTEXTS[context]():
                    interpret(inner, scope, modules, wrap)
                pool.append(scope[-1])
            case Region(values, ways, inner):
                pool.append(_region(inner, [at(pool, value) for value in values], ways, modules, wrap))


def _region(
    steps: Sequence[Step], values: list[Tensor], ways: Sequence[str], modules: list[nn.Module], wrap: Wrap
) -> Tensor:
    used = {step.module % len(modules) for step in _all_steps(steps) if isinstance(step, Use)} if modules else set()
    reached = [module if index in used else nn.Identity() for index, module in enumerate(modules)]

    def body(values: list[Tensor]) -> Tensor:
        pool = list(values)
        interpret(steps, pool, reached, wrap)
        return pool[-1]

    return call(wrap, body, values, ways)


def call(wrap: Wrap, body: Body, values: list[Tensor], ways: Sequence[str]) -> Any:
    """`body(values)` as a region, with each of the values handed over in its own way."""
    by_way = {way: {i: value for i, value in enumerate(values) if at(ways, i) == way} for way in WAYS}
    order, closed_over = list(by_way["positional"]), by_way["closed over"]

    def fn(*args: Tensor, nested: Any = None, default: dict[int, Tensor] = by_way["default"], **kwargs: Tensor) -> Any:
        found = dict(zip(order, args)) | closed_over | default
        found |= {index: tensor for index, (tensor, _) in (nested or [{}])[0].items()}
        found |= {int(name.removeprefix("x")): tensor for name, tensor in kwargs.items()}
        return body([found[index] for index in sorted(found)])

    keywords: dict[str, Any] = {f"x{index}": value for index, value in by_way["keyword"].items()}
    if by_way["nested"]:
        keywords["nested"] = [{index: (value, index) for index, value in by_way["nested"].items()}]
    return wrap(fn, values)(*by_way["positional"].values(), **keywords)


def packed(values: list[Tensor], container: str) -> Any:
    """`values` as a function may return them."""
    if container == "dict":
        return {f"out{index}": value for index, value in enumerate(values)}
    if container == "nested":
        return [values[0], {"rest": (tuple(values[1:]), None, 3)}]
    return values[0] if container == "one" else tuple(values) if container == "tuple" else values


def _all_steps(steps: Sequence[Step]) -> Iterator[Step]:
    for step in steps:
        yield step
        if isinstance(step, (Within, Region)):
            yield from _all_steps(step.steps)

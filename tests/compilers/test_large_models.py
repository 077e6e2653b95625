"""Compiled code in models so large that regions note modules when the forward reaches them: it reaches them unseen."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Callable
from types import MethodType, SimpleNamespace
from typing import Any
from unittest import mock

import oracle
import pytest
import torch
import torch._dynamo
from oracle import compare
from several import each
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

from reactivate import checkpoint, policies
from reactivate._snapshot import module_access
from reactivate._snapshot.trees import LARGE_TREE
from reactivate._torch.private_api import Missing

pytestmark = pytest.mark.usefixtures("fresh_compiler")

WIDTH = 4
STEPS = 3  # the first two are compared, the third is not

Way = Callable[[Tensor], Tensor]
compiled = functools.partial(torch.compile, backend="eager")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        scale = self.scale.mul_(1.25).clone()
        return self.norm(self.linear(x * scale)).tanh()


class Model(nn.Module):
    """A model that calls its block in the middle in a way that is given to it."""

    way: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(LARGE_TREE // 2))

    def forward(self, x: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            x = self.way(x) if index == 3 and self.way is not None else block(x)
        return x


class Given(Block):
    """A block that calls a part of the model that it is given."""

    def forward(self, x: Tensor, model: Any) -> Tensor:
        return super().forward(model.extra[0](x))


class Hidden(nn.Module):
    """A module that calls one that it does not hold as a child, in a compiled method."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.__dict__["inner"] = inner
        self.compiled = compiled(self.run)

    def run(self, x: Tensor) -> Tensor:
        return self.inner(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.compiled(x)


def in_place(model: Model, block: Block) -> None:
    block.compile(**compiled.keywords)


def wrapper(model: Model, block: Block) -> None:
    model.blocks[3] = compiled(block)


def forward(model: Model, block: Block) -> None:
    block.forward = compiled(block.forward)


def forward_of_the_class(model: Model, block: Block) -> None:
    block.__class__ = type("Compiled", (Block,), {"forward": compiled(Block.forward)})


def call_of_the_module(model: Model, block: Block) -> None:
    block._call_impl = compiled(block._call_impl)


def attribute(model: Model, block: Block) -> None:
    model.way = compiled(lambda x: block(x))


def bound_method(model: Model, block: Block) -> None:
    model.way = compiled(block.forward)


def item_of_a_dict(model: Model, block: Block) -> None:
    model.table = {"way": compiled(lambda x: block(x))}
    model.way = lambda x: model.table["way"](x)


def item_of_a_list(model: Model, block: Block) -> None:
    model.table = [compiled(lambda x: block(x))]
    model.way = lambda x: model.table[0](x)


def function_of_a_partial(model: Model, block: Block) -> None:
    model.way = functools.partial(compiled(lambda layer, x: layer(x)), block)


def attribute_of_an_object(model: Model, block: Block) -> None:
    model.table = SimpleNamespace(way=compiled(lambda x: block(x)))
    model.way = lambda x: model.table.way(x)


def attribute_of_the_block(model: Model, block: Block) -> None:
    block.table = {"way": compiled(lambda x: block.norm(block.linear(x)) * block.scale.mul_(1.25).clone())}
    model.way = lambda x: block.table["way"](x)


def other_module(model: Model, block: Block) -> None:
    model.way = Hidden(block)


def method_of_the_model(model: Model, block: Block) -> None:
    model.way = MethodType(compiled(lambda self, x: self._modules["blocks"]._modules["3"](x)), model)


def made_in_each_call(model: Model, block: Block) -> None:
    model.way = lambda x: compiled(block.forward)(x)


def after_it_was_reached(model: Model, block: Block) -> None:
    """Reach the block before the compiled code begins: what it held at first counts."""
    run = compiled(lambda x: block(x))
    model.way = lambda x: run(block(x))


WAYS = [
    *(in_place, wrapper, forward, forward_of_the_class, call_of_the_module, attribute, bound_method, item_of_a_dict),
    *(item_of_a_list, function_of_a_partial, attribute_of_an_object, attribute_of_the_block, other_module),
    *(method_of_the_model, made_in_each_call, after_it_was_reached),
]


def trained(way: Callable[[Model, Block], None], wrap: Callable[..., Any], place: str, **options: Any) -> list[Any]:
    """Train a model with its region around the module, or a function; return all that it computed and holds."""
    torch._dynamo.reset()
    model = Model()
    way(model, model.blocks[3])
    call = wrap(model, **options) if place == "module" else wrap(lambda x: model(x), **options)
    return oracle.trained(model, call, STEPS)


@pytest.mark.parametrize("place", ["module", "function"])
@each("way", WAYS)
def test_compiled_code(way: Any, place: str) -> None:
    watched = compare(lambda wrap, **options: trained(way, wrap, place, **options), check="metadata")
    assert watched.regions == watched.recomputations == STEPS


@each("way", [in_place, wrapper, forward, forward_of_the_class, attribute])
def test_nothing_is_compiled_again(way: Any) -> None:
    """The forward of a region is observed, and its recomputation is not: both run the code that was compiled first."""

    def graphs(wrap: Callable[..., Any]) -> int:
        torch._dynamo.reset()
        counter = CompileCounter()
        with mock.patch.dict(globals(), compiled=functools.partial(torch.compile, backend=counter)):
            trained(way, wrap, "module")
        return counter.frame_count

    assert graphs(checkpoint) == graphs(lambda fn: fn)


@each("way", [attribute, item_of_a_dict, after_it_was_reached])
def test_a_saved_module_beside_compiled_code(way: Any) -> None:
    policy = policies.save_modules("blocks.0.linear")
    watched = compare(lambda wrap, **options: trained(way, wrap, "module", **options), policy=policy)
    assert watched.regions == watched.recomputations == STEPS


def test_a_model_that_is_an_argument() -> None:
    """Show what docs/limits.md says of modules that are passed to compiled ones, and of attributes."""

    def argument(model: Model, block: Block) -> None:
        block.__class__, model.extra = Given, nn.ModuleList(Block() for _ in range(LARGE_TREE // 2))
        block.compile(backend="eager")
        model.way = lambda x: block(x, model)

    def as_attribute(model: Model, block: Block) -> None:
        argument(model, block)
        block.__dict__["model"] = model

    compare(lambda wrap, **options: trained(as_attribute, wrap, "module", **options), check="metadata")
    with pytest.raises(AssertionError, match="differs"):
        compare(lambda wrap, **options: trained(argument, wrap, "module", **options), check="metadata")


def test_a_torch_that_does_not_say_when_compiled_code_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """A region then notes all of a large model."""
    monkeypatch.delattr(module_access, "_compiled_calls")
    monkeypatch.setattr(module_access, "begin_of_compiled_call", lambda: Missing("the function"))
    watched = compare(lambda wrap, **options: trained(item_of_a_dict, wrap, "module", **options), check="metadata")
    assert watched.regions == watched.recomputations == STEPS


FIRST = """
import sys

import torch
from torch import nn

import reactivate


def trained(wrap):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(40)))
    model.table = [model[3]]
    steps = []

    def run(x):
        for index, block in enumerate(model):
            is_compiled = steps and index == 3
            x = torch.compile(lambda x: block(x), backend="eager")(x) if is_compiled else block(x)
        return x

    call = wrap(run)
    for _ in range(2):
        call(torch.ones(5, 4, requires_grad=True)).sum().backward()
        steps.append("torch._dynamo" in sys.modules)
    return model.state_dict(), steps


ours, steps = trained(lambda run: reactivate.checkpoint(run, check="metadata"))
assert steps == [False, True], steps
plain, _ = trained(lambda run: run)
assert all(torch.equal(value, ours[name]) for name, value in plain.items())
"""


def test_what_is_compiled_first_inside_of_a_region() -> None:
    """torch loads its compiler during the forward."""
    done = subprocess.run([sys.executable, "-c", FIRST], capture_output=True, text=True)
    assert not done.returncode, done.stderr

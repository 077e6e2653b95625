"""Regions of one model that share what they note of it, as long as a walk would find the same."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count, cycle
from typing import Any

import numpy
import pytest
import torch
from journal import Journal
from oracle import compare, leaf, trained
from several import each
from torch import Tensor, nn

import reactivate
from reactivate._snapshot.holders import LARGEST
from reactivate._snapshot.kinds import SMALL_BYTES
from reactivate._snapshot.parts import Layout
from reactivate._snapshot.trees import LARGE_TREE, single_modules, tree_under, whole_trees

WIDTH, REGIONS = 4, 5


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x).tanh() * self.scale


class Config:
    def __init__(self) -> None:
        self.factor = 1.0


class Trainer:
    """A trainer leads back to its model: no structure with it is kept from step to step."""

    def __init__(self, model: nn.Module, thing: Any) -> None:
        self.model, self.factor, self.log, self.thing = model, 1.0, [1.0], thing


class Model(nn.Module):
    """A model whose method is a region for each of its blocks, with a change in the method or between two regions."""

    number = 0

    def __init__(self, step: Callable[[Any], object], is_large: bool = True, thing: Any = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(LARGE_TREE if is_large else 9))
        self.factor, self.config = 1, Config()
        self.in_step = step
        if not is_large:
            self.trainer = Trainer(self, thing)
        elif thing is not None:
            self.thing = thing

    def step(self, index: int, x: Tensor, is_changed: bool) -> Tensor:
        self.in_step(self, is_changed)
        factor = self.factor * self.config.factor * (len(self.blocks) + len(self.blocks._backward_hooks)) / LARGE_TREE
        return (self.blocks[index](x) * factor * (1 + self.number)).tanh()

    def forward(self, x: Tensor, wrap: Callable[..., Any], between: Callable[[Any], object]) -> Tensor:
        for index in range(REGIONS):
            x = wrap(self.step)(index % 2, x, index > 1)
            if index:  # the first two regions see that the model is large, and share a moment
                between(self)
        return x


class Numbered(Model):
    number = 1


def nothing(model: Any, is_changed: bool = True) -> None:
    pass


def change_an_attribute(model: Any, is_changed: bool = True) -> None:
    model.factor = 3 - model.factor


def set_back_an_attribute(model: Any, is_changed: bool = True) -> None:
    model.factor = 1


def change_a_config(model: Any, is_changed: bool = True) -> None:
    model.config.factor += 0.5


def another_config(model: Any, is_changed: bool = True) -> None:
    model.config = Config()


def change_the_class(model: Any, is_changed: bool = True) -> None:
    model.__class__ = Numbered if type(model) is Model else Model


def add_a_block(model: Any, is_changed: bool = True) -> None:
    model.blocks.append(Block().requires_grad_(False))


def remove_a_block(model: Any, is_changed: bool = True) -> None:
    del model.blocks[-1]


def hook_the_model(model: Any, is_changed: bool = True) -> None:
    model.blocks.register_full_backward_hook(nothing)


def another_block(model: Any, is_changed: bool = True) -> None:
    torch.manual_seed(len(model.blocks))
    model.blocks[0] = Block()


trains = cycle([True, True, False, True])


def train_a_buffer(model: Any) -> None:
    """Of the regions of the first block only the second one begins with a buffer that is trained."""
    model.blocks[0].scale.requires_grad_(next(trains))


CHANGES = [
    *(nothing, change_an_attribute, change_a_config, another_config, change_the_class, add_a_block, remove_a_block),
    *(hook_the_model, another_block),
]


@each(
    "step, between",
    [
        *((change, nothing) for change in CHANGES),
        *((nothing, change) for change in [*CHANGES, train_a_buffer]),
        (change_an_attribute, set_back_an_attribute),
        (change_a_config, another_config),
    ],
)
def test_a_change(step: Any, between: Any) -> None:
    def once(wrap: Callable[..., Any], **options: Any) -> list[Any]:
        model = Model(step)
        told = lambda: [model.factor, len(model.blocks), model.blocks[0].scale.grad]  # noqa: E731
        return trained(model, lambda x: model(x, lambda f: wrap(f, **options), between), 2, told)

    watched = compare(once, check="metadata")
    assert watched.regions == watched.recomputations == 2 * REGIONS


def test_no_other_thread_takes_a_tree_that_is_being_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(nothing, is_large=False)
    tree, seen, read = tree_under([model]), Journal(), Layout.read

    def read_beside_another(layout: Layout, namespaces: Any) -> Any:
        monkeypatch.setattr(Layout, "read", read)
        with ThreadPoolExecutor(1) as pool:
            seen.append(pool.submit(tree.still_holds).result())
        return read(layout, namespaces)

    assert tree.still_holds()
    monkeypatch.setattr(Layout, "read", read_beside_another)
    model.factor = 2
    assert not tree.still_holds()
    assert [*seen] == [False]
    model.factor = 1
    assert tree.still_holds()


def test_a_module_with_another_namespace_is_walked_over() -> None:
    model = Model(nothing, is_large=False)
    tree = tree_under([model])
    assert tree.still_holds()
    model.__dict__ = dict(model.__dict__)
    assert not tree.still_holds() and tree_under([model]).parts.namespaces[0] is vars(model)


def test_a_tensor_with_a_graph_is_no_state() -> None:
    model = Model(nothing, is_large=False, thing=torch.ones(WIDTH))
    tree = tree_under([model])
    assert whole_trees.again([model]) is tree
    model.trainer.thing.mul_(leaf(WIDTH))
    assert whole_trees.again([model]) is None
    assert [item is model.trainer.thing for item in tree.tensors].count(True) == 1


def moment_of(model: Model) -> Any:
    tree = single_modules.kept[id(model)].live()
    return None if tree is None else tree.moment()


def thing_of(model: Any) -> Any:
    return model.trainer.thing if hasattr(model, "trainer") else model.thing


def use_the_log(model: Any, is_changed: bool = True) -> None:
    model.trainer.log[0] += 1
    model.factor = model.trainer.factor * model.trainer.log[0]


def use_the_thing(model: Any, is_changed: bool = True) -> None:
    """Use and change a thing as soon as it is small enough to be restored, or has no graph."""
    if is_changed:
        thing = thing_of(model)
        if not isinstance(thing, Tensor) or not thing.requires_grad:
            thing[0] += 1
        model.factor = float(thing[0])


class Buffered(nn.Module):
    """A counter without parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("number", torch.zeros(WIDTH))

    def forward(self) -> float:
        self.number.add_(1)
        return self.number[0].item()


class Protocol(nn.Module):
    """A counter in a list that is too large to be copied."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = [0.0] * (LARGEST + 1)

    def forward(self) -> float:
        self.numbers[0] += 1
        return self.numbers[0]

    def recompute_state(self) -> float:
        return self.numbers[0]

    def load_recompute_state(self, state: float) -> None:
        self.numbers[0] = state


def call_the_thing(model: Any, is_changed: bool = True) -> None:
    model.factor = model.thing()


def hook_or_free_the_model(model: Any) -> None:
    if model.blocks._backward_hooks:
        model.blocks._backward_hooks.clear()
    else:
        hook_the_model(model)


def go_on(model: Any, is_changed: bool = True) -> None:
    model.factor = next(model.trainer.thing)


def change_a_trainer(model: Any) -> None:
    model.trainer.factor += 0.5


def another_log(model: Any) -> None:
    model.trainer.log = [0.5]


def shrink(model: Any) -> None:
    thing = model.trainer.thing
    if isinstance(thing, bytearray):
        del thing[8:]
    else:
        thing.resize(4, refcheck=False)


def detach(model: Any) -> None:
    thing_of(model).detach_()


def make_a_graph(model: Any) -> None:
    thing = thing_of(model)
    if not thing.requires_grad:
        thing.mul_(model.blocks[1].linear.bias)


def with_a_graph() -> Tensor:
    return torch.ones(WIDTH, requires_grad=True) * 2


@each(
    "step, between, thing, is_large",
    [
        *((change, nothing, object, False) for change in [*CHANGES, use_the_log]),
        *((nothing, change, object, False) for change in [*CHANGES, train_a_buffer]),
        *((use_the_log, change, object, False) for change in (change_a_trainer, another_log)),
        (use_the_thing, shrink, partial(bytearray, 2 * SMALL_BYTES), False),
        (use_the_thing, shrink, partial(numpy.zeros, SMALL_BYTES), False),
        *((use_the_thing, detach, with_a_graph, is_large) for is_large in (False, True)),
        *((use_the_thing, make_a_graph, partial(torch.ones, WIDTH), is_large) for is_large in (False, True)),
        *((call_the_thing, nothing, kind, True) for kind in (Buffered, Protocol)),
        *((nothing, hook_or_free_the_model, object, is_large) for is_large in (False, True)),
        *((go_on, change, partial(count, 1), False) for change in (nothing, go_on, change_a_trainer)),
    ],
)
def test_a_change_to_what_the_model_leads_to(step: Any, between: Any, thing: Any, is_large: bool) -> None:
    def once(wrap: Callable[..., Any], **options: Any) -> list[Any]:
        model = Model(step, is_large, thing())
        if is_large:  # its structure is kept from here on
            wrap(model.step, **options)(0, leaf(5, WIDTH), False).sum().backward()
            wrap(model.step, **options)(0, leaf(5, WIDTH), False).sum().backward()
        return trained(model, lambda x: model(x, lambda f: wrap(f, **options), between), 1, lambda: [model.factor])

    watched = compare(once, check="metadata")
    assert watched.regions == watched.recomputations == REGIONS + 2 * is_large


def test_a_tree_that_is_not_kept_is_shared() -> None:
    model = Model(nothing, is_large=False)
    x, outs, trees = leaf(5, WIDTH), [], []
    for _ in range(3):
        outs.append(reactivate.checkpoint(model.step)(0, x, False))
        trees.append(whole_trees.again([model]))
    assert trees[0] is trees[1] is trees[2] is not None
    assert not whole_trees.kept.get(id(model))
    del outs, trees
    assert whole_trees.again([model]) is None


def test_a_moment_that_still_holds_is_shared() -> None:
    model = Model(nothing)
    regions, moments = [reactivate.checkpoint(model.step) for _ in range(3)], []
    x = leaf(5, WIDTH)
    reactivate.checkpoint(model.step)(0, x, False)  # the structure is known from here on
    outs = []
    for region in regions:
        outs.append(region(0, x, False))
        moments.append(moment_of(model))
    model.factor = 2
    outs.append(regions[0](0, x, False))
    changed = moment_of(model)
    assert moments[0] is moments[1] is moments[2] is not None
    assert changed is not None and changed is not moments[0]
    del moments, changed
    assert moment_of(model) is not None, "the last graph has it"
    del outs
    assert moment_of(model) is None

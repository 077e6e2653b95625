"""Regions of one large model that share a moment of a module, as long as this is what it was."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle
from typing import Any

import torch
from oracle import compare, leaf, trained
from several import each
from torch import Tensor, nn

import reactivate
from reactivate._snapshot.trees import LARGE_TREE, single_modules

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


class Model(nn.Module):
    """A large model whose method is a region for each of its blocks, with a change in the method or between two regions."""

    number = 0

    def __init__(self, step: Callable[[Any], object]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(LARGE_TREE))
        self.factor, self.config = 1, Config()
        self.in_step = step

    def step(self, index: int, x: Tensor) -> Tensor:
        self.in_step(self)
        factor = self.factor * self.config.factor * (len(self.blocks) + len(self.blocks._backward_hooks)) / LARGE_TREE
        return (self.blocks[index](x) * factor * (1 + self.number)).tanh()

    def forward(self, x: Tensor, wrap: Callable[..., Any], between: Callable[[Any], object]) -> Tensor:
        for index in range(REGIONS):
            x = wrap(self.step)(index % 2, x)
            if index:  # the first two regions see that the model is large, and share a moment
                between(self)
        return x


class Numbered(Model):
    number = 1


def nothing(model: Any) -> None:
    pass


def change_an_attribute(model: Any) -> None:
    model.factor = 3 - model.factor


def set_back_an_attribute(model: Any) -> None:
    model.factor = 1


def change_a_config(model: Any) -> None:
    model.config.factor += 0.5


def another_config(model: Any) -> None:
    model.config = Config()


def change_the_class(model: Any) -> None:
    model.__class__ = Numbered if type(model) is Model else Model


def add_a_block(model: Any) -> None:
    model.blocks.append(Block().requires_grad_(False))


def remove_a_block(model: Any) -> None:
    del model.blocks[-1]


def hook_the_model(model: Any) -> None:
    model.blocks.register_full_backward_hook(nothing)


def another_block(model: Any) -> None:
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


def test_a_moment_that_still_holds_is_shared() -> None:
    model = Model(nothing)
    regions, moments = [reactivate.checkpoint(model.step) for _ in range(3)], []
    x = leaf(5, WIDTH)
    reactivate.checkpoint(model.step)(0, x)  # the structure is known from here on
    outs = []
    for region in regions:
        outs.append(region(0, x))
        moments.append(single_modules.kept[id(model)].moment())
    model.factor = 2
    outs.append(regions[0](0, x))
    changed = single_modules.kept[id(model)].moment()
    assert moments[0] is moments[1] is moments[2] is not None
    assert changed is not None and changed is not moments[0]
    del moments, changed
    assert single_modules.kept[id(model)].moment() is not None, "the last graph has it"
    del outs
    assert single_modules.kept[id(model)].moment() is None

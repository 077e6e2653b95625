"""Saved calls that return what was there before: a parameter, a buffer, a list or an object of the model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import oracle
import torch
from oracle import compare
from saved_call_cases import Reasons
from several import each
from torch import Tensor, nn

import reactivate
from reactivate import policies
from reactivate._passes.observing import observed_by

WIDTH, STEPS = 4, 4


@dataclass
class Cache:
    number: int = 0
    items: list[int] = field(default_factory=list)


class Model(nn.Module):
    def __init__(self, use: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("scale", torch.ones(WIDTH))
        self.items: list[int] = []
        self.cache = Cache()
        self.use = use

    def saved(self, fn: Callable[..., Any], *args: Any) -> Any:
        return reactivate.site(fn, name="saved")(*args)

    def forward(self, x: Tensor) -> Tensor:
        return (self.use(self, x) * (0.1 + len(self.items) + self.cache.number + len(self.cache.items))).tanh()


def parameter(model: Any, x: Tensor) -> Tensor:
    weight = model.saved(lambda: model.linear.weight)
    if isinstance(weight, nn.Parameter):
        weight = weight.clone()
    return x @ weight.mul_(1.01)


def leaf_in_a_tuple(model: Any, x: Tensor) -> Tensor:
    y, weight = model.saved(lambda x: (model.linear(x), model.linear.weight), x)
    return y * 2 if weight.is_leaf and weight is model.linear.weight else y * 3


def parameter_made_inside(model: Any, x: Tensor) -> Tensor:
    weight = model.saved(lambda: nn.Parameter(model.linear.weight.detach() * 2))
    return x @ weight if isinstance(weight, nn.Parameter) else x


def buffer(model: Any, x: Tensor) -> Tensor:
    scale = model.saved(lambda: model.scale)
    return model.linear(x) * (2.0 if scale is model.scale else 3.0)


def list_that_grows(model: Any, x: Tensor) -> Tensor:
    y, items = model.saved(lambda x: (model.linear(x), model.items), x)
    items.append(1)
    return y


def object_that_counts(model: Any, x: Tensor) -> Tensor:
    y, cache = model.saved(lambda x: [model.linear(x), model.cache], x)
    cache.number += 1
    cache.items.append(1)
    return y * (2.0 if cache is model.cache else 3.0)


def list_in_an_object(model: Any, x: Tensor) -> Tensor:
    found = model.saved(lambda x: {"y": model.linear(x), "items": model.cache.items}, x)
    found["items"].append(1)
    return found["y"]


def list_made_by_the_region(model: Any, x: Tensor) -> Tensor:
    model.items = [1]
    y, items = model.saved(lambda x: (model.linear(x), model.items), x)
    items.append(1)
    return y


def list_made_by_the_call(model: Any, x: Tensor) -> Tensor:
    found = model.saved(lambda x: [model.linear(x), [1]], x)
    found[1].append(2)
    return found[0] * len(found[1])


WAYS = [
    *(
        parameter,
        leaf_in_a_tuple,
        parameter_made_inside,
        buffer,
        list_that_grows,
        object_that_counts,
        list_in_an_object,
    ),
    *(list_made_by_the_region, list_made_by_the_call),
]
REASONS = {
    parameter: "it returns a parameter",
    leaf_in_a_tuple: "it returns a parameter",
    parameter_made_inside: "it returns a parameter",
    buffer: "it returns a parameter, a buffer",
    list_made_by_the_region: "its result holds a list that the region had made before",
}


@each("use", WAYS)
def test_a_result_that_was_there_before(use: Any) -> None:
    """Objects are handed back as they are. Calls that return tensors, or objects of the region's, run again."""

    def trained(wrap: Callable[..., Any], **options: Any) -> list[Any]:
        model = Model(use)

        def counts() -> list[Any]:
            return [len(model.items), model.cache.number, len(model.cache.items)]

        return oracle.trained(model, wrap(model, **options), STEPS, counts)

    options: Any = {"policy": policies.save_names("saved"), "check": "metadata"}
    watched = compare(trained, **options)
    assert watched.regions == watched.recomputations == STEPS
    with observed_by(reasons := Reasons()):
        trained(reactivate.checkpoint, **options)
    wanted = REASONS.get(use, "None")
    assert len(reasons.found) == STEPS and all(wanted in str(item) for item in reasons.found), reasons.found

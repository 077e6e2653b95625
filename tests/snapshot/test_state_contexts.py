"""Containers and objects behind context variables: rewound for a recomputation, and held by no region."""

from __future__ import annotations

import random
import sys
import weakref
from collections import OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from journal import Journal
from memory import alive, without_collector
from oracle import Watched
from state_programs import Holding, Programs, Wrap, backward, curve, leaf, state_of, train
from torch import Tensor, nn

import reactivate
from reactivate import policies
from reactivate._passes.observing import observed_by

PROGRAMS = Programs()
test_program = PROGRAMS.test()
right_with = PROGRAMS.right_with
collector: ContextVar[Any] = ContextVar("collector")
growing: ContextVar[list[int]] = ContextVar("growing", default=[])  # noqa: B039


@contextmanager
def collecting(value: Any) -> Iterator[Any]:
    token = collector.set(value)
    try:
        yield value
    finally:
        collector.reset(token)


class Layer(nn.Module):
    """A layer whose router's logits a hook collects, as transformers has it."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.linear = nn.Linear(4, 4), nn.Linear(4, 4)
        self.router.register_forward_hook(lambda module, args, out: collector.get()["logits"].append(out))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x * self.router(x).softmax(-1)).tanh()


def collected(layers: Any, x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Call layers one behind the other, with a collector that is gone when this returns."""
    with collecting({"logits": []}) as found:
        for layer in layers:
            x = layer(x)
    return x, tuple(found["logits"])


# -- what a recomputation finds -----------------------------------------------------------------------------------------


@right_with(recomputations=6)
def logits_that_a_hook_collects(wrap: Wrap) -> Any:
    model = nn.ModuleList(Layer() for _ in range(3))
    layers = list(map(wrap, model))
    found = []
    for _ in range(2):
        out, logits = collected(layers, leaf(6, 4))
        backward(out, *logits)
        found.append(len(logits))
    return [found, state_of(model)]


@right_with(recomputations=6)
def the_number_of_collected_items_is_read(wrap: Wrap) -> Any:
    """And the last one of them, which a region before has computed."""

    def fn(x: Tensor) -> Tensor:
        items = collector.get()
        x = curve(x, len(items) + (items[-1].detach() if items else 0))
        items.append(x.sin())
        return x

    def forward(x: Tensor) -> Tensor:
        with collecting([]) as items:
            for _ in range(3):
                x = region(x)
            return x + sum(items)

    region = wrap(fn)
    return train(forward, [leaf(4) for _ in range(2)])


Pair = namedtuple("Pair", ["first", "second"])


@right_with(recomputations=4)
def containers_of_every_class(wrap: Wrap) -> Any:
    """Nested in one another, and each of them changed."""
    queue = deque([3, 2, 1], maxlen=3)
    shared = [1.0]
    found: dict[str, Any] = {
        "set": {1, 2},
        "deque": queue,
        "ordered": OrderedDict(a=1, b=2),
        "default": defaultdict(list),
        "tuple": ([1], {"x": [2]}),
        "pair": Pair([], {}),
        "shared": [shared, shared],
    }
    found["self"] = found

    def fn(x: Tensor) -> Tensor:
        items = collector.get()
        number = len(items["set"]) + items["deque"][0] + len(items["default"]["new"]) + len(items["pair"].first)
        number += items["self"]["self"]["tuple"][1]["x"][-1] + (items["shared"][0] is items["shared"][1])
        number += items["shared"][0][-1] + next(iter(items["ordered"].values()))
        items["set"].add(len(items["set"]) + 10)
        items["deque"].append(number)
        items["ordered"].move_to_end(next(iter(items["ordered"])))
        items["default"]["new"].append(x)
        items["tuple"][1]["x"].append(number)
        items["pair"].first.append(x)
        items["shared"][1].append(number % 7)
        return curve(x, number)

    def forward(x: Tensor) -> Tensor:
        with collecting(found):
            return region(region(x))

    region = wrap(fn)
    gradients = train(forward, [leaf(4) for _ in range(2)])
    return [gradients, sorted(found["set"]), list(queue), queue.maxlen, list(found["ordered"]), shared]


@dataclass
class State:
    count: int = 0
    items: list[Any] = field(default_factory=list)


@right_with(recomputations=6)
def objects_with_containers(wrap: Wrap) -> Any:
    states = [State(), SimpleNamespace(count=1, items=[])]

    def fn(x: Tensor) -> Tensor:
        state = collector.get()["state"]
        state.count += 1
        state.items.append(x.detach())
        return curve(x, state.count + len(state.items))

    def forward(x: Tensor) -> Tensor:
        for state in states:
            with collecting({"state": state}):
                x = region(x)
        return x

    region = wrap(fn)
    gradients = train(forward, [leaf(4) for _ in range(3)])
    return [gradients, [(state.count, len(state.items)) for state in states]]


class Items(tuple[Any, ...]):
    """A tuple of a class of its own, with attributes, which is no `namedtuple`."""


@right_with(recomputations=3)
def values_of_a_variable_that_the_code_does_not_name(wrap: Wrap) -> Any:
    def fn(x: Tensor) -> Tensor:
        value = next(value for variable, value in copy_context().items() if variable.name == "collector")
        if isinstance(value, Items):
            value[0].append(x.detach())
            return curve(x, len(value[0]))
        value.count += 1
        return curve(x, value.count)

    region, found = wrap(fn), []
    values = Items(([],)), State(), SimpleNamespace(count=1)
    for value in values:
        with collecting(value):
            found.append(backward(region(leaf(4))))
    return [found, *values[0][0], values[1].count, values[2].count]


@right_with(recomputations=3)
def the_caller_keeps_its_container(wrap: Wrap) -> Any:
    """The list is the same object with the same items after the backward, during which the variable is set."""

    def fn(x: Tensor) -> Tensor:
        collector.get().append(x.sin())
        return curve(x, len(collector.get()))

    region = wrap(fn)
    found = []
    with collecting([]) as items:
        for _ in range(3):
            out = region(leaf(4))
            before = list(items)
            backward(out, *items[-1:])
            found.append(len(before) == len(items) and all(one is other for one, other in zip(before, items)))
            found.append(collector.get() is items)
    return [found, items]


@right_with(recomputations=6)
def a_container_that_is_reached_in_two_ways(wrap: Wrap) -> Any:
    """Through the variable, and as an attribute, an argument, a closed-over variable."""

    class Keeping(Holding):
        def forward(self, x: Tensor) -> Tensor:
            items = collector.get()["items"]
            items.append(1)
            return curve(self.linear(x), len(self.items) + (items is self.items))

    module = Keeping(linear=nn.Linear(4, 4), items=[])
    items: list[int] = []

    def closing(x: Tensor) -> Tensor:
        collector.get()["items"].append(1)
        return curve(x, len(items) + (collector.get()["items"] is items))

    def given(x: Tensor, given_items: list[int]) -> Tensor:
        collector.get()["items"].append(1)
        return curve(x, len(given_items) + (collector.get()["items"] is given_items))

    one, other, third = wrap(module), wrap(closing), wrap(given)

    def forward(x: Tensor) -> Tensor:
        with collecting({"items": module.items}):
            x = one(x)
        with collecting({"items": items}):
            return third(other(x), items)

    return [train(forward, [leaf(4) for _ in range(2)]), module.items, items, state_of(module)]


@right_with(recomputations=4)
def a_queue_that_the_regions_empty(wrap: Wrap) -> Any:
    region = wrap(lambda x: curve(x, collector.get().pop()))

    def forward(x: Tensor) -> Tensor:
        with collecting([4, 3, 2]):
            return region(region(x))

    return train(forward, [leaf(4) for _ in range(2)])


@right_with(recomputations=3)
def tensors_in_a_container(wrap: Wrap) -> Any:
    """One is replaced by each region, one is written to, small and large."""

    def fn(x: Tensor) -> Tensor:
        items = collector.get()
        x = curve(x, items["scale"] + items["sum"][0, :4] + items["large"][0, :4])
        items["scale"] = items["scale"] * 0.5
        items["sum"].add_(1)
        return x

    region = wrap(fn)
    items = {"scale": torch.ones(4), "sum": torch.zeros(1, 4), "large": torch.zeros(64, 128)}
    with collecting(items):
        gradients = train(region, [leaf(4) for _ in range(3)])
    return [gradients, items]


@right_with(recomputations=2)
def a_random_source_in_a_container(wrap: Wrap) -> Any:
    items = [random.Random(3), torch.Generator().manual_seed(4)]

    def fn(x: Tensor) -> Tensor:
        source, generator = collector.get()
        return curve(x, source.random() + torch.rand(4, generator=generator))

    with collecting(items):
        gradients = train(wrap(fn), [leaf(4) for _ in range(2)])
        return [gradients, items[0].random(), items[1].get_state()]


@right_with(recomputations=6)
def regions_inside_of_regions(wrap: Wrap) -> Any:
    def inner(x: Tensor) -> Tensor:
        collector.get().append(x)
        return curve(x, len(collector.get()))

    def outer(x: Tensor) -> Tensor:
        collector.get().append(x)
        return checkpointed(checkpointed(x)).sin()

    checkpointed = wrap(inner)
    around = wrap(outer)
    with collecting([]) as items:
        return [train(lambda x: around(x), [leaf(4) for _ in range(2)]), len(items)]


@right_with(recomputations=3)
def several_backwards(wrap: Wrap) -> Any:
    """Of a graph that is retained, and one inside of the region."""

    def fn(x: Tensor) -> Tensor:
        items = collector.get()
        items.append(len(items))
        factor = torch.ones(4, requires_grad=True)
        (slope,) = torch.autograd.grad(curve(x.detach(), factor * len(items)).sum(), factor)
        items.append(len(items))
        return curve(x, slope * len(items))

    x = leaf(4)
    with collecting([]) as items:
        out = wrap(fn)(x).sum()
        out.backward(retain_graph=True)
        out.backward(retain_graph=True)
        out.backward()
    return [x.grad, items]


@right_with(recomputations=3)
def the_default_of_a_variable(wrap: Wrap) -> Any:
    growing.get().clear()

    def fn(x: Tensor) -> Tensor:
        growing.get().append(1)
        return curve(x, len(growing.get()))

    return [train(wrap(fn), [leaf(4) for _ in range(3)]), len(growing.get())]


@right_with(recomputations=4)
def a_tree_of_many_modules(wrap: Wrap) -> Any:
    class Wide(Holding):
        def forward(self, x: Tensor) -> Tensor:
            for found in (collector.get()["logits"], collector.get()["own"]):
                found.append(len(found))
            x = curve(self.layers[7](x), len(self.items) + len(collector.get()["logits"]))
            collector.get()["own"].append(x)
            return x

    module = Wide(layers=nn.ModuleList(nn.Linear(4, 4) for _ in range(80)), items=[])
    region = wrap(module)

    def forward(x: Tensor) -> Tensor:
        with collecting({"logits": [], "own": module.items}):
            return region(region(x))

    return [train(forward, [leaf(4) for _ in range(2)]), len(module.items), state_of(module)]


@right_with(recomputations=6)
def saved_calls_that_collect(wrap: Wrap) -> Any:
    """A call that appends runs again, since what comes after it in the region reads the list."""

    class TraceSummary(Holding):
        def forward(self, x: Tensor) -> Tensor:
            x = self.layer(x)
            return curve(x, collector.get()["logits"][-1].detach() + len(collector.get()["logits"]))

    model = nn.ModuleList(TraceSummary(layer=Layer()) for _ in range(3))
    layers = [wrap(layer, policy=policies.save_modules("layer")) for layer in model]

    def forward(x: Tensor) -> Tensor:
        out, logits = collected(layers, x)
        return out + sum(logits)

    return [train(forward, [leaf(6, 4) for _ in range(2)]), state_of(model)]


# -- cost -----------------------------------------------------------------------------------------------------------------


def calls_of(fn: Any, x: Tensor) -> int:
    """Count the functions that Python calls for one call of `fn`."""
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        fn(x)
    finally:
        sys.setprofile(None)
    return calls


def test_variables_without_containers_cost_nothing() -> None:
    region, x = reactivate.checkpoint(lambda x: x.sin().cos(), check="metadata"), leaf(4)
    with collecting("a text"):
        for _ in range(5):
            region(x)
        before = calls_of(region, x)
    with collecting([1]):
        assert calls_of(region, x) > before
    assert calls_of(region, x) <= before  # where there is no value at all


# -- memory -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_set", [False, True], ids=["the variable is reset", "the variable is set"])
def test_nothing_grows_in_the_backward(is_set: bool) -> None:
    """The list has the items of the forward, and those of recomputations are gone with them."""
    made = Journal()

    def fn(x: Tensor) -> Tensor:
        item = x.sin()
        made.append(weakref.ref(item))
        collector.get().append(item)
        return curve(x, len(collector.get()))

    regions = [reactivate.checkpoint(fn) for _ in range(3)]
    watched = Watched()
    with without_collector(), observed_by(watched):
        x = leaf(4)
        token = collector.set([])
        items = collector.get()
        for region in regions:
            x = region(x)
        if not is_set:
            collector.reset(token)
        before = list(items)
        (x.sum() + sum(item.sum() for item in items)).backward()
        assert len(items) == len(before) == 3 and all(one is other for one, other in zip(items, before))
        assert watched.recomputations == 3 and len(made) == 6
        assert alive(made) == 3
        del before, x
        items.clear()
        assert not alive(made)
        if is_set:
            collector.reset(token)


@pytest.mark.parametrize("make", [list, dict], ids=["a list", "lists in a dict"])
def test_a_region_without_a_backward_holds_no_container(make: Any) -> None:
    """The items of the list lead to the graph, and the graph to the region."""

    def fn(x: Tensor) -> Tensor:
        items = collector.get()
        (items if isinstance(items, list) else items.setdefault("new", [])).append(x.sin())
        return curve(x, 2)

    region, watched = reactivate.checkpoint(fn), Watched()
    with without_collector(), observed_by(watched):
        for _ in range(5):
            with collecting(make()) as items:
                x = region(region(leaf(4)))
            made = [weakref.ref(item) for item in (items if isinstance(items, list) else items["new"])]
            del items
            assert len(made) == 2 and not alive(made)  # although the graph is there
            made = [weakref.ref(x)]
            del x
            assert not alive(made)
    assert watched.regions == 10

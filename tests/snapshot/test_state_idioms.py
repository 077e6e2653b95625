"""Idioms that an attack found wrong or refused: factories of numbers, late methods, weak proxies, cleared gradients."""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import sys
import unittest.mock
import weakref
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from state_programs import Holding, Programs, Wrap, backward, curve, gradients, leaf
from torch import Tensor, nn

from reactivate._snapshot.facts import facts_of, find_facts

PROGRAMS = Programs()
test_program = PROGRAMS.test()
right = PROGRAMS.right
STEPS = 7  # the first, second and fourth call are compared; what begins later is not


def trained(wrap: Wrap, fn: Any, *others: Any) -> list[Any]:
    """Run a function of a leaf and a number for a few steps, and return the gradients."""
    checkpointed, found = wrap(fn), []
    for step in range(STEPS):
        x = leaf(4)
        backward(checkpointed(x, step))
        found.append(x.grad)
    return [*found, *others]


# -- factories of numbers ---------------------------------------------------------------------------------------------


@right
def vocabulary_that_counts(wrap: Wrap) -> Any:
    vocabulary: Any = collections.defaultdict(itertools.count(1).__next__)
    return trained(wrap, lambda x, step: curve(x, vocabulary[f"word {step}"] + vocabulary["a"])), dict(vocabulary)


@right
def method_of_an_iterator_in_an_attribute(wrap: Wrap) -> Any:
    class Numbers(Holding):
        def forward(self, x: Tensor, step: int) -> Tensor:
            return curve(x, self.next())

    numbers = Numbers(next=itertools.count().__next__)
    return trained(wrap, numbers), numbers.next()


@right
def factory_of_a_dataclass(wrap: Wrap) -> Any:
    numbers = itertools.count()

    @dataclass
    class Token:
        value: Tensor
        number: int = field(default_factory=numbers.__next__)

    return trained(wrap, lambda x, step: curve(Token(x).value, 2)), next(numbers)


@right
def layer_that_the_first_call_adds_to_an_optimizer(wrap: Wrap) -> Any:
    base, found = nn.Linear(4, 4), []
    optimizer = torch.optim.SGD(base.parameters(), lr=0.1)
    layers: dict[str, nn.Linear] = {}

    def forward(x: Tensor, step: int) -> Tensor:
        if not layers:
            layers["late"] = nn.Linear(4, 4)
            optimizer.add_param_group({"params": [*layers["late"].parameters()]})
        return layers["late"](base(x)).sin()

    found = trained(wrap, forward)
    return found, len(optimizer.param_groups), gradients(base), gradients(layers["late"])


# -- classes ----------------------------------------------------------------------------------------------------------


CALLS = 0


@right
def method_that_is_replaced_in_the_midst_of_training(wrap: Wrap) -> Any:
    """Names that the new one reads are known from its first call on."""
    global CALLS
    CALLS = 0

    class Net(nn.Module):
        def act(self, x: Tensor) -> Tensor:
            return x.sin()

        def forward(self, x: Tensor) -> Tensor:
            return self.act(x)

    def act(self: Net, x: Tensor) -> Tensor:
        global CALLS
        CALLS += 1
        return curve(x, CALLS)

    net, found = Net(), []
    checkpointed = wrap(net)
    for step in range(STEPS):
        if step == 4:
            Net.act = act  # type: ignore[method-assign]
        x = leaf(4)
        backward(checkpointed(x))
        found.append(x.grad)
    return found, CALLS


@right
def singleton_by_a_metaclass(wrap: Wrap) -> Any:
    class Singleton(type):
        instances: dict[type, Any] = {}

        def __call__(cls, *args: Any) -> Any:
            if cls not in cls.instances:
                cls.instances[cls] = super().__call__(*args)
            return cls.instances[cls]

    class Meter(metaclass=Singleton):
        def __init__(self) -> None:
            self.number = 0

        def tick(self) -> int:
            self.number += 1
            return self.number

    return trained(wrap, lambda x, step: curve(x, Meter().tick() if step > 3 else 1)), Meter().number


@right
def module_that_comes_after_the_first_calls(wrap: Wrap) -> Any:
    helper = sys.modules.pop("helper_of_idioms")

    def forward(x: Tensor, step: int) -> Tensor:
        if step < 4:
            return curve(x, 1)
        import helper_of_idioms as imported  # type: ignore[import-not-found]

        return curve(x, imported.tick())

    checkpointed, found = wrap(forward), []
    for step in range(STEPS):
        if step == 4:
            exec(HELPER, vars(helper))
            sys.modules["helper_of_idioms"] = helper
        x = leaf(4)
        backward(checkpointed(x, step))
        found.append(x.grad)
    return found, helper.number  # type: ignore[attr-defined]


def test_facts_of_a_function_are_kept_though_it_may_import_what_is_not_there() -> None:
    """As one with an optional package: to find them takes longer than a call."""
    assert find_facts(imports_what_is_not_there) is facts_of(imports_what_is_not_there)
    assert facts_of(imports_what_is_not_there).awaited == ("no_such_package",)


def imports_what_is_not_there(x: Tensor) -> Tensor:
    with contextlib.suppress(ImportError):
        import no_such_package  # type: ignore[import-not-found]  # noqa: F401
    return x.sin()


def counts_by(wrap: Wrap, tick: Any, read: Any) -> Any:
    """A method begins to count when its region is not compared any more."""
    return trained(wrap, lambda x, step: curve(x, tick() if step > 3 else 1)), read()


@right
def method_of_an_object_that_counts_at_module_level(wrap: Wrap) -> Any:
    class Counter:
        def tick(self) -> int:
            global CALLS
            CALLS += 1
            return CALLS

    global CALLS
    CALLS = 0
    counter = Counter()
    return counts_by(wrap, lambda: counter.tick(), lambda: CALLS)


@right
def methods_of_objects_that_close_over_a_count(wrap: Wrap) -> Any:
    numbers = [0, 0, 0]

    class Counter:
        def tick(self) -> int:
            numbers[0] += 1
            return numbers[0]

        @staticmethod
        def tick_statically() -> int:
            numbers[1] += 1
            return numbers[1]

    class Named(NamedTuple):
        number: int

        def tick(self) -> int:
            numbers[2] += self.number
            return numbers[2]

    counter, named = Counter(), Named(2)
    found = [
        counts_by(wrap, lambda: each(), lambda: [*numbers])
        for each in (lambda: counter.tick(), lambda: Counter.tick_statically(), lambda: named.tick())
    ]
    return found, numbers


HELPER = """
number = 0
items = []

def tick():
    global number
    number += 1
    items.append(number)
    return number + len(items)
"""


@pytest.fixture(autouse=True)
def helper(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("helper_of_idioms")
    monkeypatch.setitem(sys.modules, "helper_of_idioms", module)


@right
def module_that_is_imported_where_it_is_used(wrap: Wrap) -> Any:
    helper: Any = sys.modules["helper_of_idioms"]
    exec(HELPER, vars(helper))

    def as_a_module(x: Tensor, step: int) -> Tensor:
        import helper_of_idioms as imported  # type: ignore[import-not-found]

        imported.number += 1
        return curve(x, imported.tick() if step > 3 else 1)

    def by_name(x: Tensor, step: int) -> Tensor:
        from helper_of_idioms import tick

        return curve(x, tick() if step > 3 else 1)

    return trained(wrap, as_a_module), trained(wrap, by_name), helper.number, [*helper.items]


@right
def members_of_a_class_that_are_no_functions(wrap: Wrap) -> Any:
    counts = [0, 0, 0]

    class Tick:
        def __init__(self, index: int) -> None:
            self.index, self.number = index, 0

        def __call__(self, *_: Any) -> int:
            self.number += 1
            counts[self.index] = self.number
            return self.number

    class Uses:
        static, prop = staticmethod(Tick(0)), property(Tick(1))
        partial = functools.partialmethod(lambda self, tick: tick(), Tick(2))

    uses = Uses()
    return counts_by(wrap, lambda: uses.static() + uses.prop + uses.partial(), lambda: [*counts])


@right
def objects_in_a_set_and_as_keys(wrap: Wrap) -> Any:
    class Counter:
        number = 0

        def tick(self) -> int:
            self.number += 1
            return self.number

    ones, others, keys = {Counter()}, frozenset({Counter()}), {Counter(): 1}
    every = (*ones, *others, *keys)
    groups: Any = ones, others, keys
    tick = lambda: sum(each.tick() for group in groups for each in group)  # noqa: E731
    return counts_by(wrap, tick, lambda: [each.number for each in every])


@right
def order_of_a_set_that_grows(wrap: Wrap) -> Any:
    """The order stays that of the forward, also of numbers that fall into one place."""
    seen: set[int] = set()

    def forward(x: Tensor, step: int) -> Tensor:
        seen.add([15, 7, 31, 23, 39, 1, 2][step])
        return curve(x, 2)

    return trained(wrap, forward), [*seen]


@right
def global_that_is_only_written(wrap: Wrap) -> Any:
    """The value stays that of the second forward, not of the recomputation of the first."""

    def forward(x: Tensor) -> Tensor:
        global LEFT
        LEFT = x.detach().sum().item()
        return curve(x, 2)

    checkpointed, first, second = wrap(forward), leaf(4), leaf(4)
    one, _ = checkpointed(first), checkpointed(second)
    backward(one)
    return LEFT, first.grad


LEFT = 0.0


# -- gradients and hooks ----------------------------------------------------------------------------------------------


def cleared(wrap: Wrap, clear: Any) -> Any:
    first, last = nn.Linear(4, 4), nn.Linear(4, 4)
    clears, found = clear(first, last), []

    def forward(x: Tensor) -> Tensor:
        clears()
        return first(x).sin()

    checkpointed = wrap(forward)
    for _ in range(STEPS):
        backward(last(checkpointed(torch.randn(3, 4))))
        found += [gradients(first), gradients(last)]
    return found


@right
def gradients_cleared_through_an_optimizer(wrap: Wrap) -> Any:
    """A recomputation comes when layers behind it have their gradients already, and must not clear these."""
    return cleared(wrap, lambda *layers: torch.optim.SGD(nn.ModuleList(layers).parameters(), lr=0.1).zero_grad)


@right
def gradients_cleared_by_hand(wrap: Wrap) -> Any:
    def clear(*layers: nn.Module) -> Any:
        parameters = [item for layer in layers for item in layer.parameters()]

        def by_hand() -> None:
            for parameter in parameters:
                parameter.grad = None

        return by_hand

    return cleared(wrap, clear)


@right
def hook_on_a_leaf_in_a_dict(wrap: Wrap) -> Any:
    weights, handles, found = {"w": leaf(4, 4)}, [], []

    def forward(x: Tensor) -> Tensor:
        handles.append(weights["w"].register_hook(lambda gradient: gradient * 0.5))
        return (x @ weights["w"]).sin()

    checkpointed = wrap(forward)
    for _ in range(STEPS):
        weights["w"].grad = None
        backward(checkpointed(torch.randn(3, 4)))
        handles.pop().remove()
        hooks: Any = weights["w"]._backward_hooks
        found += [weights["w"].grad, len(hooks)]
    return found


# -- proxies, mocks, and modules without a hash -----------------------------------------------------------------------


@right
def proxy_of_the_parent_as_an_attribute(wrap: Wrap) -> Any:
    class Child(nn.Module):
        def __init__(self, parent: nn.Module) -> None:
            super().__init__()
            self.layer, self.parent = nn.Linear(4, 4), weakref.proxy(parent)

        def forward(self, x: Tensor, step: int) -> Tensor:
            self.parent.number += 1
            return curve(self.layer(x), self.parent.number)

    parent: Any = nn.Module()
    parent.number = 0
    child = parent.child = Child(parent)
    return trained(wrap, child), parent.number, gradients(child.layer)


@right
def proxy_as_an_argument(wrap: Wrap) -> Any:
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    checkpointed, x = wrap(lambda x, module: first(x) * module(x)), leaf(3, 4)
    backward(checkpointed(x, weakref.proxy(second)))
    return x.grad, gradients(first), gradients(second)


class Thing:
    pass


class Callable_:
    def __call__(self) -> None:
        pass


@right
def proxies_of_what_is_gone(wrap: Wrap) -> Any:
    found = []
    for kind in (Thing, Callable_):
        dead = weakref.proxy(kind())
        layer: Any = nn.Linear(4, 4)
        layer.things = [dead]
        for fn in (lambda x, dead=dead: layer(x) if type(dead) is not int else x, layer):
            x = leaf(3, 4)
            backward(wrap(fn)(x))
            found += [x.grad]
        holder = {"dead": dead}
        x = leaf(3, 4)
        backward(wrap(lambda x, holder=holder: x.sin() if holder else x)(x))
        found += [x.grad]
    return found


class Unhashable(nn.Module):
    def __eq__(self, other: object) -> bool:
        return isinstance(other, Unhashable)

    def forward(self, x: Tensor) -> Tensor:
        return curve(x, 2)


@right
def module_without_a_hash(wrap: Wrap) -> Any:
    module, x, y = Unhashable(), leaf(4), leaf(4)
    backward(wrap(lambda x: module(x).sin())(x), wrap(lambda y, each: each(y).cos())(y, module))
    return x.grad, y.grad


@right
def mock_of_a_module(wrap: Wrap) -> Any:
    mock, x = unittest.mock.Mock(spec=nn.Linear), leaf(4)
    backward(wrap(lambda x: x.sin() if mock is not None else x)(x))
    return x.grad


@right
def state_that_refers_to_the_one_before(wrap: Wrap) -> Any:
    """The chain grows by one with each step, and no step is refused."""

    @dataclass
    class State:
        number: float
        before: Any = None

    class Net(nn.Module):
        state: Any = None

        def forward(self, x: Tensor) -> Tensor:
            self.state = State(1.0 if self.state is None else self.state.number + 1.0, self.state)
            return curve(x, self.state.number)

    net, found = Net(), []
    checkpointed = wrap(net)
    for step in range(300):
        x = leaf(4)
        backward(checkpointed(x))
        found += [x.grad] if step % 50 == 49 else []
    return found, net.state.number

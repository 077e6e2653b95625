"""Containers and objects: the recomputation sees the very ones of the forward, with the contents that they had."""

from __future__ import annotations

import array
import contextlib
import csv
import enum
import functools
import io
import itertools
import re
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import numpy
import pytest
import torch
from several import each
from state_programs import Holding, Program, Programs, Wrap, backward, check_program, curve, gradients, leaf, train
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

import reactivate
from reactivate._snapshot.iterators import copied, position_of
from reactivate.errors import RecomputeMismatchError

PROGRAMS = Programs()
right, right_by, right_with, loud = PROGRAMS.right, PROGRAMS.right_by, PROGRAMS.right_with, PROGRAMS.loud


@pytest.mark.parametrize("program", PROGRAMS.listed, ids=str)
def test_program(program: Program) -> None:
    check_program(program)


def inputs(count: int = 2) -> list[Tensor]:
    return [leaf(4) for _ in range(count)]


# -- containers and objects ---------------------------------------------------------------------------------------------


def compared_with_is(wrap: Wrap, make: Callable[[], Any]) -> Any:
    """Pass the object that the function captures, too, and ask whether they are one."""
    config, weight = make(), leaf(4)

    def fn(x: Tensor, given: Any) -> Tensor:
        return curve(x * weight, 2 if given is config else 3)

    return [train(wrap(fn), inputs(), config), weight.grad]


PROGRAMS.rows(
    compared_with_is,
    {
        "list_argument_is_the_captured_list": (lambda: [1, 2],),
        "dict_argument_is_the_captured_dict": (lambda: {"a": 1},),
        "set_argument_is_the_captured_set": (lambda: {1, 2},),
        "tuple_argument_with_a_tensor_is_the_captured_tuple": (lambda: (torch.ones(2), 1),),
        "list_argument_with_a_leaf_is_the_captured_list": (lambda: [leaf(2), 1],),
    },
)


@right
def nested_containers_are_the_captured_ones(wrap: Wrap) -> Any:
    inner = {"layers": [leaf(4), {"w": leaf(4)}]}

    def fn(x: Tensor, given: dict[str, Any]) -> Tensor:
        same = given["config"] is inner and given["config"]["layers"][1] is inner["layers"][1]
        return curve(x * inner["layers"][0], 2 if same else 3)

    checkpointed = wrap(fn)
    return [train(lambda x: checkpointed(x, {"config": inner}), inputs()), inner["layers"][0].grad]


@right
def object_argument_is_the_captured_object(wrap: Wrap) -> Any:
    return compared_with_is(wrap, lambda: SimpleNamespace(width=4, weight=torch.ones(2)))


@right
def sentinel_and_enum_arguments_are_themselves(wrap: Wrap) -> Any:
    missing = object()

    class Mode(enum.Enum):
        FAST = 1

    def fn(x: Tensor, given: Any, mode: Mode) -> Tensor:
        return curve(x, (2 if given is missing else 3) + (5 if mode is Mode.FAST else 7))

    return train(wrap(fn), inputs(), missing, Mode.FAST)


@right
def argument_holds_one_tensor_twice(wrap: Wrap) -> Any:
    def fn(pair: list[Tensor], other: Tensor) -> Tensor:
        same = (pair[0] is pair[1]) + 2 * (pair[0] is other)
        return curve(pair[0], 1 + same) * pair[1]

    checkpointed = wrap(fn)
    return train(lambda x: checkpointed([x, x], x), inputs())


@right
def argument_holds_one_list_twice(wrap: Wrap) -> Any:
    def fn(x: Tensor, first: list[int], second: dict[str, list[int]]) -> Tensor:
        first.append(3)
        return curve(x, sum(second["a"]))

    checkpointed = wrap(fn)

    def step(x: Tensor) -> Tensor:
        shared = [1, 2]
        return checkpointed(x, shared, {"a": shared})

    return train(step, inputs())


@right
def list_contains_itself(wrap: Wrap) -> Any:
    items: list[Any] = [1]
    items.append(items)
    return train(wrap(lambda x, items: curve(x, 2 if items[1] is items else 3)), inputs(), items)


def mutated(wrap: Wrap, mutate: Callable[[Any], float], make: Callable[[], Any], show: Callable[[Any], Any]) -> Any:
    """A container that the function changes, as an argument and as a captured value; `mutate` returns a factor."""
    as_argument, captured = make(), make()
    checkpointed = wrap(lambda x, given: curve(curve(x, mutate(given)), mutate(captured)))
    grads = train(lambda x: checkpointed(x, as_argument), inputs(3))
    return [grads, show(as_argument), show(captured)]


@right
def list_is_popped(wrap: Wrap) -> Any:
    return mutated(wrap, lambda items: items.pop(), lambda: [1.0, 2.0, 3.0], list)


@right_by(mutated, lambda: [1, 2], list)
def list_is_appended_and_reversed(items: list[int]) -> float:
    items.append(len(items))
    items.reverse()
    return 1 + items[0] + len(items)


@right_by(mutated, dict, dict)
def dict_item_is_counted_up(items: dict[str, int]) -> float:
    items["n"] = items.get("n", 0) + 1
    return items["n"]


@right_by(mutated, lambda: {"a": 1, "b": 2, "c": 4}, lambda items: list(items.items()))
def dict_order_changes(items: dict[str, int]) -> float:
    first = next(iter(items))
    items[first] = items.pop(first)
    return items[first]


@right_by(mutated, set, sorted)
def set_is_added_to(items: set[int]) -> float:
    items.add(len(items))
    return 1 + len(items)


@right_by(mutated, lambda: deque([1, 2, 4], maxlen=3), lambda items: [list(items), items.maxlen])
def deque_with_a_limit_rotates(items: deque[int]) -> float:
    items.rotate(1)
    items.append(items[0] + 3)
    return items[0]


@right
def ordered_dict_moves_to_end(wrap: Wrap) -> Any:
    def mutate(items: OrderedDict[str, int]) -> float:
        first = next(iter(items))
        items.move_to_end(first)
        items["new"] = items.get("new", 0) + 1
        return items[first] + items["new"]

    def show(items: OrderedDict[str, int]) -> Any:
        return [list(items.items()), list(reversed(items)), len(items)]

    return mutated(wrap, mutate, lambda: OrderedDict(a=1, b=2, c=4), show)


@right_by(mutated, lambda: defaultdict(list), dict)
def defaultdict_makes_its_entries(items: defaultdict[str, list[int]]) -> float:
    items["a"].append(1)
    return len(items["a"])


@right_by(mutated, Counter, dict)
def counter_counts(items: Counter[str]) -> float:
    items.update(["a"])
    return items["a"]


@right
def dataclass_field_changes(wrap: Wrap) -> Any:
    @dataclass
    class State:
        step: int = 0
        seen: list[int] = field(default_factory=list)

    def mutate(state: State) -> float:
        state.step += 1
        state.seen.append(state.step)
        return state.step + len(state.seen)

    return mutated(wrap, mutate, State, lambda state: [state.step, state.seen])


class Private:
    """Its slot has a name that Python mangles."""

    __slots__ = ("__count",)

    def __init__(self) -> None:
        self.__count = 0

    def next(self) -> int:
        self.__count += 1
        return self.__count


@right
def private_slot_changes(wrap: Wrap) -> Any:
    counter = Private()
    return [train(wrap(lambda x: curve(x, counter.next())), inputs(3)), counter.next()]


@right
def slot_changes(wrap: Wrap) -> Any:
    class State:
        __slots__ = ("late", "step")

        def __init__(self) -> None:
            self.step = 0

    def mutate(state: State) -> float:
        state.step += 1
        factor = state.step + (5 if hasattr(state, "late") else 0)
        state.late = True
        return factor

    return mutated(wrap, mutate, State, lambda state: [state.step, state.late])


class Referred:
    """Can be referred to weakly, and has other attributes beside its slot."""

    __slots__ = ("__dict__", "__weakref__", "step")

    def __init__(self) -> None:
        self.step = self.other = 0

    def next(self) -> int:
        self.step += 1
        self.other += 2
        return self.step + self.other


@right
def slot_beside_a_dict_and_weak_references_changes(wrap: Wrap) -> Any:
    return mutated(wrap, Referred.next, Referred, Referred.next)


class Base:
    __slots__ = ("_step",)


class Hidden(Base):
    """A property without a setter has the name of the slot below, which `pathlib` does as well."""

    __slots__ = ()

    @property
    def _step(self) -> int:
        return Base._step.__get__(self)  # type: ignore[attr-defined, no-any-return]

    def next(self) -> int:
        Base._step.__set__(self, getattr(self, "_step", 0) + 1)  # type: ignore[attr-defined]
        return self._step


@right
def slot_behind_a_property_changes(wrap: Wrap) -> Any:
    return mutated(wrap, Hidden.next, Hidden, Hidden.next)


class Checked:
    """A property with a setter has taken the place of a slot, as decorators that check what is set do."""

    __slots__ = ("step",)

    def __init__(self) -> None:
        self.step = 0

    def next(self) -> int:
        self.step += 1
        return self.step


Checked.step = property(Checked.step.__get__, Checked.step.__set__)  # type: ignore[attr-defined, assignment]


@right
def slot_that_is_a_property_changes(wrap: Wrap) -> Any:
    return mutated(wrap, Checked.next, Checked, Checked.next)


@right
def path_is_read_for_the_first_time(wrap: Wrap) -> Any:
    path = Path("some") / "folder" / "file.txt"

    def fn(x: Tensor) -> Tensor:
        return curve(x, len(str(path)) + len(path.parts) + len(path.suffix) + path.with_name("other").is_absolute())

    return [train(wrap(fn), inputs(3)), str(path), path.parts]


@right_by(mutated, SimpleNamespace, lambda state: sorted(vars(state)))
def attribute_is_made_and_deleted(state: SimpleNamespace) -> float:
    if hasattr(state, "mark"):
        del state.mark
        return 2.0
    state.mark = 1
    return 3.0


@right
def class_of_an_object_changes(wrap: Wrap) -> Any:
    class Cold:
        factor = 2.0

    class Warm(Cold):
        factor = 3.0

    def mutate(state: Cold) -> float:
        factor = state.factor
        state.__class__ = Warm
        return factor

    return mutated(wrap, mutate, Cold, lambda state: type(state).__name__)


@right_by(mutated, lambda: {"state": SimpleNamespace(seen=[])}, lambda items: items["state"].seen)
def list_in_an_object_in_a_dict_grows(items: dict[str, Any]) -> float:
    items["state"].seen.append(1)
    return len(items["state"].seen)


@right
def captured_list_is_replaced_by_the_function(wrap: Wrap) -> Any:
    seen: list[int] = []

    def fn(x: Tensor) -> Tensor:
        nonlocal seen
        seen = [*seen, 1]
        return curve(x, len(seen))

    return [train(wrap(fn), inputs(3)), seen]


@right
def namedtuple_with_a_list(wrap: Wrap) -> Any:
    State = namedtuple("State", "seen weight")

    def fn(x: Tensor, state: Any) -> Tensor:
        state.seen.append(1)
        return curve(x * state.weight, len(state.seen))

    state = State([], leaf(4))
    return [train(wrap(fn), inputs(3), state), state.seen, state.weight.grad]


@right
def cache_is_filled_in_the_first_forward(wrap: Wrap) -> Any:
    """A cached graph-carrying tensor stays the forward's, and the loss uses it, too."""
    cache: dict[str, Tensor] = {}

    def fn(x: Tensor) -> Tensor:
        if "k" not in cache:
            cache["k"] = x.tanh()
            return curve(x * cache["k"], 2)
        return curve(x * cache["k"], 3)

    checkpointed = wrap(fn)
    x, y = inputs()
    out = checkpointed(x)
    before = cache["k"]
    out = out + checkpointed(y)
    backward(out, cache["k"])
    return [x.grad, y.grad, cache["k"] is before, cache["k"]]


@right
def cache_object_grows_along_the_layers(wrap: Wrap) -> Any:
    class Cache:
        def __init__(self) -> None:
            self.keys: list[Tensor] = []

        def update(self, key: Tensor) -> Tensor:
            self.keys.append(key)
            return torch.stack(self.keys).sum(0)

    layers = [nn.Linear(4, 4) for _ in range(3)]
    cache, (x,) = Cache(), inputs(1)

    def block(layer: nn.Module, x: Tensor, cache: Cache) -> Tensor:
        return torch.tanh(layer(x) * cache.update(x.sin()))

    h = x
    for layer in layers:
        h = wrap(block)(layer, h, cache)
    backward(h)
    return [x.grad, len(cache.keys), cache.keys, [gradients(layer) for layer in layers]]


class Statistics:
    """Counts of a normaliser of observations, two objects away from whoever has the normaliser."""

    def __init__(self) -> None:
        self.mean, self.count = numpy.zeros(4), 1.0

    def update(self, x: Tensor) -> float:
        before = float(self.mean.sum()) + self.count
        self.mean += x.detach().numpy() / self.count
        self.count += 1
        return before


class Normalizer:
    def __init__(self) -> None:
        self.statistics = Statistics()

    def __call__(self, module: Any, args: Any, out: Tensor) -> Tensor:
        return curve(out, self.statistics.update(out))

    def hook(self, module: Any, args: Any, out: Tensor) -> Tensor:
        return self(module, args, out)


def of_an_attribute() -> Callable[[Tensor], Tensor]:
    class Model(Holding):
        def forward(self, x: Tensor) -> Tensor:
            return curve(x, self.normalizer.statistics.update(x))

    return Model(normalizer=Normalizer())


def of_a_class() -> Callable[[Tensor], Tensor]:
    class Model(nn.Module):
        normalizer = Normalizer()

        def forward(self, x: Tensor) -> Tensor:
            return curve(x, self.normalizer.statistics.update(x))

    return Model()


def of_containers_in_a_class() -> Callable[[Tensor], Tensor]:
    class Model(nn.Module):
        named = {"a": Normalizer()}
        listed = [Statistics()]
        nested = ({"a": [Statistics()]},)

        def forward(self, x: Tensor) -> Tensor:
            for found in (self.named["a"].statistics, *self.listed, *self.nested[0]["a"]):
                x = curve(x, found.update(x))
            return x

    return Model()


def of_a_hook(hook: Any) -> Callable[[Tensor], Tensor]:
    module = nn.Sequential(nn.Tanh())
    module[0].register_forward_hook(hook)
    return module


def of_a_name() -> Callable[[Tensor], Tensor]:
    global named
    named = Normalizer()
    return lambda x: curve(x, named.statistics.update(x))


def of_a_closure() -> Callable[[Tensor], Tensor]:
    normalizer = Normalizer()
    return lambda x: curve(x, normalizer.statistics.update(x))


named: Normalizer
TWO_OBJECTS_DEEP: list[Callable[[], Any]] = [
    of_an_attribute,
    of_a_class,
    of_containers_in_a_class,
    lambda: of_a_hook(Normalizer()),
    lambda: of_a_hook(Normalizer().hook),
    of_a_name,
    of_a_closure,
]


@pytest.mark.parametrize("make", TWO_OBJECTS_DEEP)
def test_state_two_objects_deep(make: Callable[[], Any]) -> None:
    def program(wrap: Wrap) -> Any:
        checkpointed = wrap(make(), check="metadata")
        xs = inputs(5)
        for calls in (xs[:1], xs[1:3], xs[3:]):
            backward(*map(checkpointed, calls))
        return [x.grad for x in xs]

    check_program(Program(program, recomputations=5))


def test_near_objects_are_not_left_out_for_far_ones() -> None:
    """There is a bound for each depth."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.far = [SimpleNamespace(inner=SimpleNamespace()) for _ in range(200)]
            self.near = [SimpleNamespace(count=1.0) for _ in range(50)]

        def forward(self, x: Tensor) -> Tensor:
            self.near[-1].count += 1
            return curve(x, self.near[-1].count)

    check_program(Program(lambda wrap: train(wrap(Model(), check="metadata"), inputs(3))))


class Far:
    """Counts three objects deep."""

    def __init__(self) -> None:
        self.a = SimpleNamespace(b=SimpleNamespace(count=1.0))

    def __getitem__(self, index: int) -> float:
        return self.a.b.count  # type: ignore[no-any-return]

    def __setitem__(self, index: int, value: float) -> None:
        self.a.b.count = value


LEFT_OUT: list[tuple[Callable[[], Any], str]] = [
    (Far, "`Holder.state.a.b` (SimpleNamespace: too deep)"),
    (lambda: numpy.ones(5_000), "`Holder.state` (ndarray: too large)"),
    (lambda: [1.0] * 5_000, "`Holder.state` (list: too large)"),
    (lambda: bytearray([1] * 20_000), "`Holder.state` (bytearray: too large)"),
]


@pytest.mark.parametrize(("make", "text"), LEFT_OUT)
def test_a_difference_names_what_is_not_restored(make: Callable[[], Any], text: str) -> None:
    class Holder(Holding):
        def forward(self, x: Tensor) -> Tensor:
            self.state[0] += 1
            return curve(x, float(self.state[0]))

    with pytest.raises(RecomputeMismatchError, match=re.escape(text)):
        backward(reactivate.checkpoint(Holder(state=make()))(leaf(4)))


# -- iterators ----------------------------------------------------------------------------------------------------------


def with_iterator(wrap: Wrap, make: Callable[[list[Any]], Any]) -> Any:
    def fn(x: Tensor, items: Any) -> Tensor:
        for item in items:
            for weight in item if isinstance(item, tuple) else (item,):
                x = curve(x * weight, 2)
        return x

    weights = [leaf(4) for _ in range(3)]
    checkpointed = wrap(fn)
    return [train(lambda x: checkpointed(x, make(weights)), inputs()), [weight.grad for weight in weights]]


PROGRAMS.rows(
    with_iterator,
    {
        "zip_argument": (lambda weights: zip(weights, [1.0, 2.0, 3.0]),),
        "enumerate_argument": (lambda weights: enumerate(weights, 1),),
        "list_iterator_argument": (iter,),
        "reversed_argument": (reversed,),
        "dict_values_argument": (lambda weights: dict(enumerate(weights)).values(),),
        "map_argument": (lambda weights: map(torch.sin, weights),),
    },
)


@right
def captured_iterator_advances(wrap: Wrap) -> Any:
    factors = iter([1.0, 2.0, 3.0, 4.0])
    return [train(wrap(lambda x: curve(x, next(factors))), inputs(3)), next(factors)]


def scaled_by_all(x: Tensor, pairs: Any) -> Tensor:
    for factor, shift in pairs:
        x = curve(x, factor) + shift
    return x


@right
def iterator_in_a_default(wrap: Wrap) -> Any:
    def step(x: Tensor) -> Tensor:
        zipped = zip([0.5, 1.5], [1.0, 2.0])

        def fn(y: Tensor, pairs: Any = zipped) -> Tensor:
            return scaled_by_all(y, pairs)

        return wrap(fn)(x)  # type: ignore[no-any-return]

    return train(step, inputs())


@right
def iterator_bound_by_a_partial(wrap: Wrap) -> Any:
    def step(x: Tensor) -> Tensor:
        fn = functools.partial(lambda pairs, y: scaled_by_all(y, pairs), zip([0.5, 1.5], [1.0, 2.0]))
        return wrap(fn)(x)  # type: ignore[no-any-return]

    return train(step, inputs())


@right
def iterator_named_by_a_partial(wrap: Wrap) -> Any:
    def step(x: Tensor) -> Tensor:
        return wrap(functools.partial(scaled_by_all, pairs=zip([0.5, 1.5], [1.0, 2.0])))(x)  # type: ignore[no-any-return]

    return train(step, inputs())


@right
def iterator_in_a_tuple(wrap: Wrap) -> Any:
    def fn(given: Any) -> Tensor:
        x, (pairs, _) = given
        return scaled_by_all(x, pairs)

    return train(lambda x: wrap(fn)((x, (zip([0.5, 1.5], [1.0, 2.0]), None))), inputs())


@right
def iterator_in_a_tuple_in_a_list(wrap: Wrap) -> Any:
    def fn(x: Tensor, given: Any) -> Tensor:
        return scaled_by_all(x, given[0][0])

    return train(lambda x: wrap(fn)(x, [(zip([0.5, 1.5], [1.0, 2.0]), None)]), inputs())


@right
def iterator_in_an_attribute_of_a_module(wrap: Wrap) -> Any:
    class Block(Holding):
        def forward(self, x: Tensor) -> Tensor:
            return curve(x, next(self.factors))

    block = Block(factors=iter([1.0, 2.0, 3.0, 4.0]))
    return [train(wrap(block), inputs(3)), next(block.factors)]


@right
def iterator_in_a_tuple_of_a_module(wrap: Wrap) -> Any:
    class Block(Holding):
        def forward(self, x: Tensor) -> Tensor:
            return curve(x, next(self.factors[0]))

    block = Block(factors=(iter([1.0, 2.0, 3.0, 4.0]), 1))
    return [train(wrap(block), inputs(3)), next(block.factors[0])]


@right
def iterator_in_an_attribute_of_a_class(wrap: Wrap) -> Any:
    class Block(nn.Module):
        factors = iter([1.0, 2.0, 3.0, 4.0])

        def forward(self, x: Tensor) -> Tensor:
            return curve(x, next(self.factors))

    return [train(wrap(Block()), inputs(3)), next(Block.factors)]


@right
def iterator_in_an_attribute_of_a_function(wrap: Wrap) -> Any:
    def fn(x: Tensor) -> Tensor:
        return curve(x, next(fn.factors))  # type: ignore[attr-defined]

    fn.factors = iter([1.0, 2.0, 3.0, 4.0])  # type: ignore[attr-defined]
    return [train(wrap(fn), inputs(3)), next(fn.factors)]


@loud
def captured_count_advances(wrap: Wrap) -> Any:
    counter = itertools.count(1)
    return [train(wrap(lambda x: curve(x, next(counter))), inputs(3)), next(counter)]


@loud
def generator_argument_is_consumed(wrap: Wrap) -> Any:
    def make(weights: list[Tensor]) -> Iterator[Tensor]:
        yield from weights

    return with_iterator(wrap, make)


def advanced(wrap: Wrap, make: Callable[[], Any], number: Callable[[Any], float] = float) -> list[Any]:
    """Advance an iterator in an attribute, an argument, a list and a closure, before and after what autograd saves."""

    class Block(Holding):
        def forward(self, x: Tensor) -> Tensor:
            y = curve(x, number(next(self.items)))
            return curve(y, number(next(self.items))) * number(next(self.items))

    block, closed_over, listed = Block(items=make()), make(), [make()]

    def fn(x: Tensor, given: list[Any]) -> Tensor:
        y = curve(curve(x, number(next(closed_over))), number(next(given[0])))
        return y * number(next(closed_over)) * number(next(given[0]))

    def of_argument(x: Tensor, given: Any) -> Tensor:
        return curve(curve(x, number(next(given))), number(next(given)))

    closing, with_argument, given = wrap(fn), wrap(of_argument), make()
    found: list[Any] = [train(wrap(block), inputs(3))]
    found.append(train(lambda x: closing(x, listed), inputs(3)))
    found.append(train(lambda x: with_argument(x, given), inputs(3)))
    return [*found, *(number(next(items)) for items in (block.items, closed_over, listed[0], given))]


def square(number: float) -> float:
    return number * number


def countdown() -> Callable[[], int]:
    numbers = [*range(30, 0, -1)]
    return numbers.pop


COPIED: dict[str, tuple[Callable[[], Any], Callable[[Any], float]]] = {
    "cycle": (lambda: itertools.cycle([1.0, 2.0, 3.0, 4.0, 5.0]), float),
    "islice": (lambda: itertools.islice(range(100), 3, 90, 2), float),
    "accumulate": (lambda: itertools.accumulate(range(1, 40)), float),
    "accumulate of a number": (lambda: itertools.accumulate(range(1, 40), initial=3), float),
    "starmap": (lambda: itertools.starmap(pow, [(i, 2) for i in range(1, 40)]), float),
    "deque": (lambda: iter(deque(range(1, 40))), float),
    "takewhile": (lambda: itertools.takewhile(lambda item: item < 90, range(1, 90)), float),
    "dropwhile": (lambda: itertools.dropwhile(lambda item: item < 2, range(1, 40)), float),
    "compress": (lambda: itertools.compress(range(1, 90), itertools.cycle([1, 0, 1])), float),
    "groupby": (lambda: itertools.groupby([1, 1, *range(2, 40)]), lambda pair: float(pair[0] + len(list(pair[1])))),
    "chain": (lambda: itertools.chain([1.0], iter(range(2, 20)), range(30)), float),
    "zip_longest": (lambda: itertools.zip_longest(range(1, 9), [1] * 30, fillvalue=2), lambda pair: float(sum(pair))),
    "strict zip": (lambda: zip(range(1, 40), range(39), strict=True), lambda pair: float(sum(pair))),
    "one iterator twice": (lambda: zip(*[iter(range(1, 90))] * 2), lambda pair: float(pair[0] - 3 * pair[1])),
    "tee": (lambda: itertools.tee(range(1, 40))[0], float),
    "array": (lambda: iter(array.array("d", range(1, 40))), float),
    "callable": (lambda: iter(functools.partial(next, itertools.count(1)), None), float),
    "method of a list": (lambda: iter(countdown(), None), float),
    "map over a list": (lambda: map(square, [*range(1, 40)]), float),
    "nditer": (lambda: numpy.nditer(numpy.arange(1, 40)), float),
    "ndenumerate": (lambda: numpy.ndenumerate(numpy.arange(1, 40)), lambda pair: float(pair[1])),
    "text stream": (lambda: io.StringIO("\n".join(map(str, range(1, 40)))), float),
    "byte stream": (lambda: io.BytesIO(b"\n".join(b"%d" % number for number in range(1, 40))), float),
}


@each("name", COPIED)
def test_advanced_iterator_is_copied(name: str) -> None:
    check_program(Program(lambda wrap: advanced(wrap, *COPIED[name]), recomputations=9))


def numbers() -> Iterator[int]:
    yield from range(1, 40)


WITHOUT_A_COPY: dict[str, Callable[[], Any]] = {
    "pairwise": lambda: map(sum, itertools.pairwise(range(1, 40))),
    "finditer": lambda: map(re.Match.group, re.finditer(r"\d", "123456789" * 9)),
    "memoryview": lambda: iter(memoryview(bytes(range(1, 40)))),
    "generator": numbers,
    "map of a generator": lambda: map(float, numbers()),
}


@each("where", ["attribute", "argument", "list", "closure"])
@each("name", WITHOUT_A_COPY)
def test_iterator_without_a_copy(name: str, where: str) -> None:
    """Nobody is disturbed as long as the forward does not advance it; if it does, the recomputation raises."""

    def make(*, advances: bool) -> Callable[[Wrap], Any]:
        def run(wrap: Wrap) -> Any:
            items = WITHOUT_A_COPY[name]()

            def scaled(x: Tensor, items: Any) -> Tensor:
                return curve(x, float(next(items)) if advances else 2.0)

            class Block(Holding):
                def forward(self, x: Tensor) -> Tensor:
                    return scaled(x, self.items)

            if where == "attribute":
                checkpointed = wrap(Block(items=items))
            elif where == "argument":
                checkpointed = functools.partial(wrap(scaled), items=items)
            elif where == "list":
                with_list = wrap(lambda x, given: scaled(x, given[0]))
                checkpointed = functools.partial(with_list, given=[items])
            else:
                checkpointed = wrap(lambda x: scaled(x, items))
            found = []
            for x in inputs(3):
                out = checkpointed(x)
                found.append(float(next(items)))
                backward(out)
                found.append(x.grad)
            return [found, float(next(items))]

        return run

    if where != "argument" or "generator" not in name:  # one that somebody has advanced before raises
        check_program(Program(make(advances=False), recomputations=3))
    with pytest.raises(reactivate.errors.UnsupportedError, match="list"):
        make(advances=True)(reactivate.checkpoint)


@right
def used_up_generator_is_asked_again(wrap: Wrap) -> Any:
    items = numbers()
    list(items)
    return train(wrap(lambda x: curve(x, next(items, 3.0))), inputs(3))


@right
def class_of_an_iterator_without_a_copy(wrap: Wrap) -> Any:
    pairs = itertools.pairwise([1, 2, 3])
    return train(wrap(lambda x: curve(x, 2 if isinstance(pairs, itertools.pairwise) else 3)), inputs(3))


def test_position_of_an_iterator() -> None:
    """The number that the iterator has reached may have the address of an earlier one."""
    steps = itertools.count(0.5)
    before = position_of(steps)
    assert position_of(steps) == before
    for _ in range(20):
        next(steps)
        assert position_of(steps) != before
    for items in (iter({1: 2, 3: 4}), iter({5, 6}), itertools.cycle([1, 2]), zip([1, 2], [3, 4])):
        before = position_of(items)
        assert position_of(items) == before
        next(items)  # type: ignore[call-overload]
        assert position_of(items) != before


def test_copy_of_a_cycle_adds_to_a_list_of_its_own() -> None:
    items = itertools.cycle(range(3))
    next(items)
    twin = copied(items)
    assert list(itertools.islice(twin, 7)) == list(itertools.islice(items, 7)) == [1, 2, 0, 1, 2, 0, 1]
    assert list(itertools.islice(twin, 3)) == list(itertools.islice(items, 3)) == [2, 0, 1]


UNNOTED: dict[str, Callable[[], Any]] = {
    "file": functools.partial(open, __file__),
    "csv": lambda: csv.reader(["1", "2"]),
    "loader": lambda: iter(DataLoader([1, 2])),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", UNNOTED)
def test_iterator_over_one_that_nobody_notes_has_no_copy(name: str) -> None:
    items = UNNOTED[name]()
    with pytest.raises(reactivate.errors.UnsupportedError, match="`enumerate`"):
        next(copied(enumerate(items)))
    getattr(items, "close", list)()


@right
def iterator_of_ones_own_is_enumerated(wrap: Wrap) -> Any:
    class Numbers:
        def __init__(self) -> None:
            self.reached = 0

        def __iter__(self) -> Numbers:
            return self

        def __next__(self) -> int:
            self.reached += 1
            return self.reached

    numbered = enumerate(Numbers())
    return train(wrap(lambda x: curve(x, sum(next(numbered)))), inputs(3))


# -- containers that are no lists ---------------------------------------------------------------------------------------


@right_by(mutated, lambda: bytearray(2), list)
def bytearray_grows(items: bytearray) -> float:
    items[0] += 1
    items.append(1)
    return items[0] * len(items)


@right_by(mutated, lambda: memoryview(bytearray(2)), list)
def memoryview_is_written_to(items: memoryview) -> float:
    items[0] += 1
    return items[0]


@right
def bytearray_in_an_attribute(wrap: Wrap) -> Any:
    class Block(Holding):
        def forward(self, x: Tensor) -> Tensor:
            self.seen[0] += 1
            return curve(x, self.seen[0])

    block = Block(seen=bytearray(2))
    return [train(wrap(block), inputs(3)), list(block.seen)]


@right_by(mutated, lambda: io.StringIO(newline="\r\n"), lambda items: [items.getvalue(), items.tell()])
def stream_is_written_to(items: io.StringIO) -> float:
    items.write("a\n")
    return len(items.getvalue())


class Slotted:
    @staticmethod
    def of(kind: Any) -> Any:
        return type("Slotted", (kind,), {"__slots__": ("count",)})


@pytest.mark.parametrize("kind", [list, dict, deque, set, OrderedDict], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("has_slots", [False, True])
def test_attributes_of_a_container(kind: Any, has_slots: bool) -> None:
    def run(wrap: Wrap) -> Any:
        def make() -> Any:
            found = (Slotted.of(kind) if has_slots else type("Open", (kind,), {}))()
            found.count = 0
            return found

        def mutate(items: Any) -> float:
            items.count += 1
            if isinstance(items, dict):
                items[items.count] = 1
            elif isinstance(items, set):
                items.add(len(items))
            else:
                items.append(items.count)
            return items.count + len(items)

        return mutated(wrap, mutate, make, lambda items: [list(items), items.count])

    check_program(Program(run, recomputations=3))


@right
def attribute_of_a_tuple(wrap: Wrap) -> Any:
    class Pair(tuple[int, ...]):
        count = 0

    def mutate(items: Pair) -> float:
        items.count += 1
        return items.count

    return mutated(wrap, mutate, lambda: Pair((1, 2)), lambda items: items.count)


class Raising:
    """Objects of these classes raise where a walk asks them for what they hold."""

    class Length(list[Any]):
        def __len__(self) -> int:
            raise OSError("length")

        def __iter__(self) -> Any:
            raise OSError("iter")

    class Keys(dict[str, Any]):
        def __len__(self) -> int:
            raise OSError("length")

        def __iter__(self) -> Any:
            raise OSError("iter")

    class Members(set[Any]):
        def __len__(self) -> int:
            raise OSError("length")

        def __iter__(self) -> Any:
            raise OSError("iter")

    class Row(tuple[Any, ...]):
        def __iter__(self) -> Any:
            raise OSError("iter")

    class Namespace:
        @property
        def __dict__(self) -> Any:
            raise OSError("dict")

    class Slot:
        __slots__ = ("empty",)

        def __getattr__(self, name: str) -> Any:
            raise OSError(name)


RAISING: dict[str, Callable[[], Any]] = {
    "list": lambda: Raising.Length([1]),
    "dict": lambda: Raising.Keys(a=1),
    "set": lambda: Raising.Members([1]),
    "tuple": lambda: Raising.Row((1, 2)),
    "object": Raising.Namespace,
    "slots": Raising.Slot,
}


@each("policy", [None, "mul"])
@each("name", RAISING)
def test_objects_that_raise_are_held(name: str, policy: str | None) -> None:
    options = {} if policy is None else {"policy": reactivate.policies.save_ops(policy)}

    def run(wrap: Wrap) -> Any:
        class Block(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.held = RAISING[name]()

            def forward(self, x: Tensor) -> Tensor:
                return curve(x, 2)

        closed_over = RAISING[name]()

        def fn(x: Tensor, given: Any) -> Tensor:
            return curve(x, 3 if given is closed_over else 2)

        checkpointed, given = wrap(fn, **options), RAISING[name]()
        return [train(wrap(Block(), **options), inputs()), train(lambda x: checkpointed(x, given), inputs())]

    check_program(Program(run, recomputations=4))


# -- attributes of tensors ------------------------------------------------------------------------------------------------


@right
def list_in_an_attribute_of_a_parameter(wrap: Wrap) -> Any:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.layer.weight.seen = []  # type: ignore[assignment]
            self.register_buffer("state", torch.ones(4))
            self.state.meta = SimpleNamespace(count=0, scale=torch.ones(4))
            self.state.meta.scale.marks = []

        def forward(self, x: Tensor) -> Tensor:
            self.layer.weight.seen.append(1)  # type: ignore[operator]
            self.state.meta.count += 1
            self.state.meta.scale.mul_(1.5)
            self.state.meta.scale.marks.append(1)
            factor = len(self.layer.weight.seen) * self.state.meta.count  # type: ignore[arg-type]
            y = curve(self.layer(x), factor + len(self.state.meta.scale.marks))
            return curve(y, self.state.meta.scale.clone())

    block = Block()
    meta = block.state.meta
    grads = train(wrap(block), inputs(4))
    return [grads, gradients(block), block.layer.weight.seen, meta.count, meta.scale, meta.scale.marks]


@right
def list_in_an_attribute_of_an_argument(wrap: Wrap) -> Any:
    mark, weight = torch.ones(4), leaf(4)
    mark.seen, weight.meta = [], SimpleNamespace(scale=torch.ones(4))  # type: ignore[attr-defined]
    weight.meta.scale.marks, weight.meta.scale.count = [], 0  # type: ignore[attr-defined]

    def fn(x: Tensor, given: Tensor) -> Tensor:
        given.seen.append(1)  # type: ignore[attr-defined]
        scale = weight.meta.scale  # type: ignore[attr-defined]
        scale.mul_(1.5)
        scale.marks.append(1)
        scale.count += 3
        return curve(curve(x, len(given.seen) + len(scale.marks) * scale.count), scale.clone() * weight)  # type: ignore[attr-defined]

    checkpointed = wrap(fn)
    grads = train(lambda x: checkpointed(x, mark), inputs(4))
    return [grads, weight.grad, mark.seen, weight.meta.scale]  # type: ignore[attr-defined]


# -- arrays -------------------------------------------------------------------------------------------------------------


PROGRAMS.rows(
    compared_with_is,
    {
        "array_argument_is_the_captured_array": (lambda: numpy.arange(3.0),),
        "bytearray_argument_is_the_captured_one": (lambda: bytearray(b"abc"),),
    },
)


@loud
def captured_array_is_added_to(wrap: Wrap) -> Any:
    seen = numpy.zeros(2)

    def fn(x: Tensor) -> Tensor:
        seen[0] += 1
        return curve(x, float(seen[0]))

    return [train(wrap(fn), inputs(3)), seen.tolist()]


# -- changed between forward and backward -------------------------------------------------------------------------------


def changed_between(
    wrap: Wrap, make: Callable[[], Any], read: Callable[[Any], float], change: Callable[[Any], Any]
) -> Any:
    """A value that the caller changes after the forward, as an argument and as a captured value."""
    as_argument, captured = make(), make()
    (x,) = inputs(1)
    out = wrap(lambda x, given: curve(curve(x, read(given)), read(captured)))(x, as_argument)
    change(as_argument)
    change(captured)
    backward(out)
    return [x.grad, read(as_argument), read(captured)]


PROGRAMS.rows(
    changed_between,
    {
        "list_is_changed_before_backward": (
            lambda: [1.0, 2.0],
            lambda items: items[-1],
            lambda items: items.append(3.0),
        ),
        "dict_is_cleared_before_backward": (
            lambda: {"a": 2.0},
            lambda items: items.get("a", 5.0),
            lambda items: items.clear(),
        ),
    },
)


@right
def ordered_dict_is_cleared_before_backward(wrap: Wrap) -> Any:
    def read(items: OrderedDict[str, float]) -> float:
        return next(iter(items.values()), 5.0) + len(list(reversed(items)))

    return changed_between(wrap, lambda: OrderedDict(a=2.0, b=3.0), read, lambda items: items.clear())


@right
def configuration_object_is_changed_before_backward(wrap: Wrap) -> Any:
    def change(config: SimpleNamespace) -> None:
        config.factor = 3.0

    return changed_between(wrap, lambda: SimpleNamespace(factor=2.0), lambda config: config.factor, change)


@right
def captured_number_is_changed_before_backward(wrap: Wrap) -> Any:
    factor = 2.0
    (x,) = inputs(1)
    out = wrap(lambda x: curve(x, factor))(x)
    factor = 3.0
    backward(out)
    return [x.grad, factor]


@right
def equal_one_element_tensors_are_told_apart(wrap: Wrap) -> Any:
    """Two tensors of one element compare equal, and are two keys of a table."""
    first, second = torch.ones(1), torch.ones(1)
    state = SimpleNamespace(current=first)
    table = {first: 2.0, second: 3.0}
    (x,) = inputs(1)
    out = wrap(lambda x: curve(x, table[state.current]))(x)
    state.current = second
    backward(out)
    return [x.grad, state.current is second]


SCALE = 2.0
TABLE = {"factor": 2.0}


@loud
def module_level_number_is_changed_before_backward(wrap: Wrap) -> Any:
    (x,) = inputs(1)
    with global_number(2.0):
        out = wrap(lambda x: curve(x, SCALE))(x)
        globals()["SCALE"] = 3.0
        backward(out)
        return [x.grad, SCALE]


@contextlib.contextmanager
def global_number(value: float) -> Iterator[None]:
    globals()["SCALE"] = value
    TABLE["factor"] = value
    try:
        yield
    finally:
        globals()["SCALE"] = value
        TABLE["factor"] = value


@loud
def module_level_number_is_changed_by_the_function(wrap: Wrap) -> Any:
    def fn(x: Tensor) -> Tensor:
        global SCALE
        SCALE += 1
        return curve(x, SCALE)

    with global_number(2.0):
        return [train(wrap(fn), inputs(3)), SCALE]


@loud
def module_level_table_is_changed_before_backward(wrap: Wrap) -> Any:
    (x,) = inputs(1)
    with global_number(2.0):
        out = wrap(lambda x: curve(x, TABLE["factor"]))(x)
        TABLE["factor"] = 3.0
        backward(out)
        return [x.grad, TABLE["factor"]]


@loud
def class_attribute_is_changed_before_backward(wrap: Wrap) -> Any:
    class Block(nn.Module):
        factor = 2.0

        def forward(self, x: Tensor) -> Tensor:
            return curve(x, self.factor)

    (x,) = inputs(1)
    out = wrap(Block())(x)
    Block.factor = 3.0
    backward(out)
    return [x.grad, Block.factor]


@loud
def class_attribute_counts_instances_calls(wrap: Wrap) -> Any:
    class Block(nn.Module):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            Block.calls += 1
            return curve(x, Block.calls)

    return [train(wrap(Block()), inputs(3)), Block.calls]


class FailsAtTanh(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.tanh.default:
            raise RuntimeError("stop")
        return func(*args, **(kwargs or {}))


@right
def recomputation_fails_and_backward_is_tried_again(wrap: Wrap) -> Any:
    seen: list[int] = []
    state = SimpleNamespace(step=0)

    def fn(x: Tensor, seen: list[int]) -> Tensor:
        seen.append(1)
        state.step += 1
        return curve(curve(x, len(seen)), state.step)

    (x,) = inputs(1)
    loss = wrap(fn)(x, seen).square().sum()
    with contextlib.suppress(RuntimeError), FailsAtTanh():
        loss.backward(retain_graph=True)
    between = [list(seen), state.step]
    x.grad = None
    loss.backward()
    return [x.grad, seen, state.step, between]


def test_a_weak_table_that_loses_entries_while_it_is_looked_at() -> None:
    """Entries go when the collector runs, which may be in the middle of a look."""

    class Key:
        pass

    class Losing(type):
        def __getattr__(cls, name: str) -> Any:
            keys.clear()  # as the collector would: asking a class for a name it has not is what runs here
            raise AttributeError(name)

    class Value(metaclass=Losing):
        scale = 2.0

    keys, kept = [Key() for _ in range(9)], Key()
    table = WeakKeyDictionary({key: Value() for key in (kept, *keys)})
    x = torch.ones(3, requires_grad=True)
    reactivate.checkpoint(lambda x: x.sin().exp() * table[kept].scale)(x).sum().backward()
    assert len(table) == 1

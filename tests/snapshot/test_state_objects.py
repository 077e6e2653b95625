"""Objects, their classes and module-level names: the recomputation finds in them what the forward did."""

from __future__ import annotations

import contextlib
import re
from collections import namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import numpy
import pytest
import torch
from state_programs import (
    Holding,
    Program,
    Programs,
    Wrap,
    backward,
    check_program,
    curve,
    gradients,
    leaf,
    mutated,
    train,
    vectors,
)
from torch import Tensor, nn

import reactivate
from reactivate.errors import RecomputeMismatchError

PROGRAMS = Programs()
test_program = PROGRAMS.test()
right, right_by, loud = PROGRAMS.right, PROGRAMS.right_by, PROGRAMS.loud


# -- attributes and slots ------------------------------------------------------------------------------------------------


@dataclass
class State:
    step: int = 0
    seen: list[int] = field(default_factory=list)


@right_by(mutated, State, lambda state: [state.step, state.seen])
def dataclass_field_changes(state: State) -> float:
    state.step += 1
    state.seen.append(state.step)
    return state.step + len(state.seen)


class Private:
    """Its slot has a name that Python mangles."""

    __slots__ = ("__count",)

    def __init__(self) -> None:
        self.__count = 0

    def next(self) -> int:
        self.__count += 1
        return self.__count


class WithSlots:
    __slots__ = ("late", "step")

    def __init__(self) -> None:
        self.step = 0


@right_by(mutated, WithSlots, lambda state: [state.step, state.late])
def slot_changes(state: WithSlots) -> float:
    state.step += 1
    factor = state.step + (5 if hasattr(state, "late") else 0)
    state.late = True
    return factor


class Referred:
    """Can be referred to weakly, and has other attributes beside its slot."""

    __slots__ = ("__dict__", "__weakref__", "step")

    def __init__(self) -> None:
        self.step = self.other = 0

    def next(self) -> int:
        self.step += 1
        self.other += 2
        return self.step + self.other


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


class Checked:
    """A property with a setter has taken the place of a slot, as decorators that check what is set do."""

    __slots__ = ("step",)

    def __init__(self) -> None:
        self.step = 0

    def next(self) -> int:
        self.step += 1
        return self.step


Checked.step = property(Checked.step.__get__, Checked.step.__set__)  # type: ignore[attr-defined, assignment]


PROGRAMS.rows(
    mutated,
    {
        "private_slot_changes": (Private.next, Private, Private.next),
        "slot_beside_a_dict_and_weak_references_changes": (Referred.next, Referred, Referred.next),
        "slot_behind_a_property_changes": (Hidden.next, Hidden, Hidden.next),
        "slot_that_is_a_property_changes": (Checked.next, Checked, Checked.next),
    },
)


@right
def path_is_read_for_the_first_time(wrap: Wrap) -> Any:
    path = Path("some") / "folder" / "file.txt"

    def fn(x: Tensor) -> Tensor:
        return curve(x, len(str(path)) + len(path.parts) + len(path.suffix) + path.with_name("other").is_absolute())

    return [train(wrap(fn), vectors(3)), str(path), path.parts]


@right_by(mutated, SimpleNamespace, lambda state: sorted(vars(state)))
def attribute_is_made_and_deleted(state: SimpleNamespace) -> float:
    if hasattr(state, "mark"):
        del state.mark
        return 2.0
    state.mark = 1
    return 3.0


class Cold:
    factor = 2.0


class Warm(Cold):
    factor = 3.0


@right_by(mutated, Cold, lambda state: type(state).__name__)
def class_of_an_object_changes(state: Cold) -> float:
    factor = state.factor
    state.__class__ = Warm
    return factor


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

    return [train(wrap(fn), vectors(3)), seen]


@right
def namedtuple_with_a_list(wrap: Wrap) -> Any:
    State = namedtuple("State", "seen weight")

    def fn(x: Tensor, state: Any) -> Tensor:
        state.seen.append(1)
        return curve(x * state.weight, len(state.seen))

    state = State([], leaf(4))
    return [train(wrap(fn), vectors(3), state), state.seen, state.weight.grad]


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
    x, y = vectors()
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
    cache, (x,) = Cache(), vectors(1)

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
        xs = vectors(5)
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

    check_program(Program(lambda wrap: train(wrap(Model(), check="metadata"), vectors(3))))


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


# -- module-level names and attributes of classes ------------------------------------------------------------------------


SCALE = 2.0
TABLE = {"factor": 2.0}


@loud
def module_level_number_is_changed_before_backward(wrap: Wrap) -> Any:
    with global_number(2.0):
        grads = train(wrap(lambda x: curve(x, SCALE)), vectors(1), between=lambda: globals().update(SCALE=3.0))
        return [grads, SCALE]


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
        return [train(wrap(fn), vectors(3)), SCALE]


@loud
def module_level_table_is_changed_before_backward(wrap: Wrap) -> Any:
    with global_number(2.0):
        grads = train(wrap(lambda x: curve(x, TABLE["factor"])), vectors(1), between=lambda: TABLE.update(factor=3.0))
        return [grads, TABLE["factor"]]


@loud
def class_attribute_is_changed_before_backward(wrap: Wrap) -> Any:
    class Block(nn.Module):
        factor = 2.0

        def forward(self, x: Tensor) -> Tensor:
            return curve(x, self.factor)

    return [train(wrap(Block()), vectors(1), between=lambda: setattr(Block, "factor", 3.0)), Block.factor]


@loud
def class_attribute_counts_instances_calls(wrap: Wrap) -> Any:
    class Block(nn.Module):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            Block.calls += 1
            return curve(x, Block.calls)

    return [train(wrap(Block()), vectors(3)), Block.calls]


def test_a_weak_table_that_loses_entries_while_it_is_looked_at() -> None:
    """Entries go when the collector runs, which may be in the middle of a look."""

    class Key:
        pass

    class Value:
        scale = 2.0

        @property
        def __dict__(self) -> Any:
            keys.clear()  # as the collector would: asking for the attributes is what runs here
            raise AttributeError

    keys, kept = [Key() for _ in range(9)], Key()
    table = WeakKeyDictionary({key: Value() for key in (kept, *keys)})
    x = torch.ones(3, requires_grad=True)
    reactivate.checkpoint(lambda x: x.sin().exp() * table[kept].scale)(x).sum().backward()
    assert len(table) == 1

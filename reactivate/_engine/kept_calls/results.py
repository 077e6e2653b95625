"""The contents of a result: a recomputation gets objects of its own, with what they held when the call returned.

Tensors are leaves, to be kept by whoever asks. Containers and plain objects are made anew around them, each once, so
that a list that occurs twice does so again. Values that cannot change are handed back as they are. For what is none of
these `problem` has words: such a result cannot be kept, and its call runs again.
"""

from __future__ import annotations

import functools
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from types import BuiltinFunctionType, FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module

from reactivate._engine.state.attributes import namespace_of, slots_of
from reactivate._engine.state.bounded import cached_by_class
from reactivate._engine.state.contents import ATOMS
from reactivate._torch.containers import registered_containers


class Leaf(NamedTuple):
    """A tensor of the result, by its number."""

    number: int


class Given(NamedTuple):
    """An object that the call was given, by its number among the arguments' objects."""

    number: int


class Made(NamedTuple):
    """An object that is made anew.

    Attributes:
        number: of the object, for when it occurs again.
        make: the object, empty; for those that cannot be filled afterwards, from what it is made of.
        fill: puts contents and attributes into it; None for those that `make` has filled.
        parts: what it is made of.
    """

    number: int
    make: Callable[..., Any]
    fill: Callable[[Any, list[Any]], None] | None
    parts: list[Any]


class Again(NamedTuple):
    """An object that has occurred before, by its number."""

    number: int


class Contents:
    """The contents of a result.

    Args:
        result: what a call returned.
        given: the numbers of objects among the arguments, by their ids.

    Attributes:
        leaves: the tensors, each once.
        problem: why the result cannot be made anew, None if it can.
        has_given: whether any of it is an object that the call was given.
    """

    def __init__(self, result: Any, given: Mapping[int, int]) -> None:
        self.leaves: list[Tensor] = []
        self.problem: str | None = None
        self.has_given = False
        self._given = given
        self._numbers: dict[int, Any] = {}
        self._alive: list[Any] = []  # so that ids stay their own
        self.plan = self._plan(result)
        del self._given, self._numbers, self._alive

    def make(self, leaves: Sequence[Any], given: Sequence[Any]) -> Any:
        """The result, around other leaves."""
        return _make(self.plan, leaves, given, {})

    def _plan(self, value: Any) -> Any:
        kind = type(value)
        if kind in ATOMS:
            return value
        found = self._numbers.get(id(value))
        if found is not None:
            return found
        if isinstance(value, Tensor):
            return self._leaf(value)
        if id(value) in self._given:
            self.has_given = True
            return Given(self._given[id(value)])
        maker = _MAKERS.get(kind)
        if maker is None and _is_as_it_is(value, kind):
            return value
        number = len(self._numbers)
        self._numbers[id(value)] = Again(number)
        if maker is not None:
            return Made(number, *maker(value, kind, self._plan))
        return self._other(value, kind, number)

    def _leaf(self, tensor: Tensor) -> Leaf:
        leaf = self._numbers[id(tensor)] = Leaf(len(self.leaves))
        self.leaves.append(tensor)
        if has_attributes(tensor):
            self.problem = "its result has attributes of its own"
        return leaf

    def _other(self, value: Any, kind: Any, number: int) -> Any:
        if kind in registered_containers:
            node = registered_containers[kind]
            children, context = node.flatten_fn(value)
            children = list(children)
            self._alive.append(children)
            make = functools.partial(_unflatten, node.unflatten_fn, context)
            return Made(number, make, None, [self._plan(child) for child in children])
        if issubclass(kind, tuple):
            make = getattr(kind, "_make", functools.partial(tuple.__new__, kind))
            return Made(number, make, None, [self._plan(item) for item in value])
        for base in (list, dict, set):
            if issubclass(kind, base):
                return self._with_attributes(value, kind, number, base)
        if is_plain(kind):
            return self._with_attributes(value, kind, number, None)
        self.problem = f"its result holds a {kind.__name__}, which may change"
        return value

    def _with_attributes(self, value: Any, kind: Any, number: int, base: Any) -> Made:
        inner = None if base is None else _MAKERS[base](value, base, self._plan)
        names = attributes_of(value)
        parts = [self._plan(item) for item in names.values()]
        fill = functools.partial(_fill_object, list(names), None if inner is None else inner[1])
        return Made(number, functools.partial(kind.__new__, kind), fill, [*parts, *([] if inner is None else inner[2])])


def _make(plan: Any, leaves: Sequence[Any], given: Sequence[Any], made: dict[int, Any]) -> Any:
    kind = type(plan)
    if kind is Leaf:
        return leaves[plan.number]
    if kind is Made:
        if plan.fill is None:
            value = made[plan.number] = plan.make([_make(part, leaves, given, made) for part in plan.parts])
        else:
            value = made[plan.number] = plan.make()
            plan.fill(value, [_make(part, leaves, given, made) for part in plan.parts])
        return value
    if kind is Again:
        return made[plan.number]
    return given[plan.number] if kind is Given else plan


def has_attributes(tensor: Tensor) -> bool:
    """Return whether somebody has set attributes on a tensor, which a tensor that is handed back would not have."""
    return type(tensor) is Tensor and bool(tensor.__dict__)


def attributes_of(value: Any) -> dict[str, Any]:
    """Return the attributes of an object, those in slots too."""
    found = dict(namespace_of(value) or {})
    kind: Any = type(value)
    found.update((name, getattr(value, name)) for name in slots_of(kind) if hasattr(value, name))
    return found


@cached_by_class
def is_plain(kind: Any) -> bool:
    """Return whether objects of this class are made of attributes alone."""
    if issubclass(kind, BaseException) or hasattr(kind, "__del__"):
        return False
    try:
        object.__new__(kind)
    except TypeError:  # abstract, or with state of its own in C
        return False
    return kind.__dictoffset__ != 0 or bool(slots_of(kind))


def _is_as_it_is(value: Any, kind: type) -> bool:
    """Return whether a value cannot change, or is somebody else's to look after: modules and generators have guards."""
    if isinstance(value, (Module, Enum, type, BuiltinFunctionType, torch.Generator)):
        return True
    return kind is FunctionType and value.__closure__ is None and not value.__dict__


Maker = tuple[Callable[..., Any], "Callable[[Any, list[Any]], None] | None", list[Any]]
Plan = Callable[[Any], Any]


def _list(value: Iterable[Any], kind: Any, plan: Plan) -> Maker:
    return list, list.extend, [plan(item) for item in value]


def _tuple(value: Iterable[Any], kind: Any, plan: Plan) -> Maker:
    return tuple, None, [plan(item) for item in value]


def _set(value: Iterable[Any], kind: Any, plan: Plan) -> Maker:
    return kind, None if kind is frozenset else set.update, [plan(item) for item in value]


def _deque(value: Any, kind: Any, plan: Plan) -> Maker:
    return functools.partial(deque, maxlen=value.maxlen), deque.extend, [plan(item) for item in value]


def _dict(value: Any, kind: Any, plan: Plan) -> Maker:
    make = functools.partial(defaultdict, value.default_factory) if kind is defaultdict else kind
    return make, _fill_dict, [plan(part) for item in dict.items(value) for part in item]


_MAKERS: dict[Any, Callable[[Any, Any, Plan], Maker]] = {
    list: _list,
    tuple: _tuple,
    set: _set,
    frozenset: _set,
    deque: _deque,
    dict: _dict,
    OrderedDict: _dict,
    defaultdict: _dict,
}


def _fill_dict(target: Any, parts: list[Any]) -> None:
    setter = OrderedDict.__setitem__ if isinstance(target, OrderedDict) else dict.__setitem__
    for key, item in zip(parts[::2], parts[1::2]):
        setter(target, key, item)


def _fill_object(names: list[str], fill: Any, target: Any, parts: list[Any]) -> None:
    for name, part in zip(names, parts):
        object.__setattr__(target, name, part)
    if fill is not None:
        fill(target, parts[len(names) :])


def _unflatten(unflatten: Any, context: Any, parts: list[Any]) -> Any:
    return unflatten(parts, context)

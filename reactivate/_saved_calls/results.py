"""The contents of a result: a recomputation gets objects of its own, with what they held when the call returned.

Tensors are leaves, to be kept elsewhere. Containers and plain objects are made anew around them, each once, so that a list
that occurs twice does so again. Values that cannot change are handed back as they are. For what is none of these `problem`
has words: such a result cannot be kept, and its call runs again.
"""

from __future__ import annotations

import contextlib
import functools
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from types import BuiltinFunctionType, FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module

from reactivate._snapshot.caches import cached_by_class
from reactivate._snapshot.contexts import COPIED, empty_like
from reactivate._snapshot.held import ATOMS
from reactivate._snapshot.kinds import is_value, namespace_of, slots_of
from reactivate._torch.ops import registered_containers


class _Pieces(NamedTuple):
    """The parts of which one result is made: its tensors, objects that the call was given, objects that are made already."""

    leaves: Sequence[Any]
    given: Sequence[Any]
    made: dict[int, Any]


Build = Callable[[_Pieces], Any]


class Contents:
    """The contents of a result.

    Args:
        result: what a call returned.
        given: the numbers of objects among the arguments, by their ids.
        was_there: whether an object was there before the call; see `effects.was_there`.

    Attributes:
        leaves: the tensors, each once.
        problem: why the result cannot be made anew, None if it can.
        has_given: whether any of it is an object that the call was given.
    """

    def __init__(self, result: Any, given: Mapping[int, int], was_there: Callable[[Any], bool | None]) -> None:
        self.leaves: list[Tensor] = []
        self.problem: str | None = None
        self.has_given = False
        self._given, self._was_there = given, was_there
        self._known: dict[int, Build] = {}
        self._alive: list[Any] = []  # so that ids stay their own
        self._build = self._plan(result)
        del self._given, self._was_there, self._known, self._alive

    def make(self, leaves: Sequence[Any], given: Sequence[Any]) -> Any:
        """Return the result, around other leaves."""
        return self._build(_Pieces(leaves, given, {}))

    def _plan(self, value: Any) -> Build:
        """Return how to make `value`."""
        kind: Any = type(value)
        if kind in ATOMS:
            return lambda parts: value
        if id(value) in self._known:
            return self._known[id(value)]
        number = len(self._known)
        if isinstance(value, Tensor):
            if has_attributes(value):
                self.problem = "its result has attributes of its own"
            self.leaves.append(value)
            index = len(self.leaves) - 1
            self._known[id(value)] = lambda parts: parts.leaves[index]
            return self._known[id(value)]
        if id(value) in self._given:
            self.has_given, place = True, self._given[id(value)]
            return lambda parts: parts.given[place]
        if _is_as_it_is(value, kind):
            return lambda parts: value
        is_tuple = isinstance(value, (tuple, frozenset))
        was_there = None if is_tuple else self._was_there(value)
        if was_there:  # a recomputation puts back what it holds, and calls that change it run again
            return lambda parts: value
        if was_there is False:
            self.problem = f"its result holds a {kind.__name__} that the region had made before"
        self._known[id(value)] = lambda parts: parts.made[number]
        if kind in registered_containers and kind not in COPIED and kind is not tuple:
            children, context = registered_containers[kind].flatten_fn(value)
            self._alive.append(children := list(children))
            unflatten = registered_containers[kind].unflatten_fn
            return self._at_once(number, lambda items: unflatten(items, context), children)
        if is_tuple:
            make = tuple if kind is tuple else getattr(kind, "_make", functools.partial(kind.__new__, kind))
            return self._at_once(number, make, [*value])
        if isinstance(value, (list, dict, set, deque)) or is_plain(kind):
            return self._filled(number, value, kind)
        self.problem = f"its result holds a {kind.__name__}, which may change"
        return lambda parts: value

    def _at_once(self, number: int, make: Callable[[list[Any]], Any], items: Sequence[Any]) -> Build:
        """Plan an object that cannot be filled afterwards."""
        plans: list[Any] = [self._plan(item) for item in items]

        def build(parts: _Pieces) -> Any:
            value = parts.made[number] = make([plan(parts) for plan in plans])
            return value

        return build

    def _filled(self, number: int, value: Any, kind: Any) -> Build:
        """Plan an object that is made empty and filled then: it may lead back to itself."""
        make = empty_like(value) if kind in COPIED else functools.partial(kind.__new__, kind)
        base: Any = next((base for base in (OrderedDict, dict, list, set, deque) if isinstance(value, base)), None)
        names = {} if kind in COPIED else namespace_of(value) or {}
        attributes = [(name, self._plan(item)) for name, item in names.items()]
        slots = [(slot, self._plan(item)) for slot, item in _filled_slots(value)]
        items = () if base is None else base.items(value) if issubclass(base, dict) else base.__iter__(value)
        plans: list[Any] = [
            (self._plan(item[0]), self._plan(item[1])) if issubclass(base, dict) else self._plan(item) for item in items
        ]

        def build(parts: _Pieces) -> Any:
            made = parts.made[number] = make()
            for name, plan in attributes:
                vars(made)[name] = plan(parts)
            for slot, plan in slots:
                slot.__set__(made, plan(parts))
            for plan in plans:
                if isinstance(plan, tuple):  # a key and its value
                    base.__setitem__(made, plan[0](parts), plan[1](parts))
                else:
                    (base.add if base is set else base.append)(made, plan(parts))
            return made

        return build


def has_attributes(tensor: Tensor) -> bool:
    """Return whether a tensor has attributes that were set on it: one that is handed back would not have them."""
    return type(tensor) is Tensor and bool(tensor.__dict__)


def attributes_of(value: Any) -> list[Any]:
    """Return what the attributes of an object hold, those in slots too."""
    return [*(namespace_of(value) or {}).values(), *(item for _, item in _filled_slots(value))]


def _filled_slots(value: Any) -> Iterator[tuple[Any, Any]]:
    for _, slot in slots_of(type(value)):
        with contextlib.suppress(Exception):  # nothing is in it, or it is a property, which may raise anything
            yield slot, slot.__get__(value)


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
    """Return whether a value cannot change, or is looked after elsewhere: modules and generators have guards."""
    if isinstance(value, (Module, Enum, type, BuiltinFunctionType, torch.Generator)):
        return True
    return is_value(kind) or (kind is FunctionType and value.__closure__ is None and not value.__dict__)

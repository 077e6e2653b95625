"""Iterators: copied, since a function that advances one uses it up."""

from __future__ import annotations

import copy
import functools
import io
import itertools
from types import BuiltinFunctionType, FunctionType, GeneratorType, MethodWrapperType, ModuleType, NoneType
from typing import Any, cast

from reactivate._snapshot.caches import cached_by_class
from reactivate.errors import UnsupportedError

_MOST_STEPS = 4096  # up to which the copy of an iterator that can only be advanced is brought to its place


@cached_by_class
def is_iterator(kind: Any) -> bool:
    """Return whether objects of this class are iterators that are copied, or generators."""
    if kind.__module__ == "numpy":
        return kind.__name__ in ("nditer", "flatiter")
    is_known = kind.__module__ in ("builtins", "itertools", "collections", "_collections", "array")
    return is_known and hasattr(kind, "__next__")


def holds_iterator(item: Any) -> bool:
    """Return whether this is an iterator, a method of one or a tuple with one in it: none can be rewound in place."""
    kind: Any = type(item)
    if kind is MethodWrapperType:  # `count().__next__`, as a factory of numbers
        return is_iterator(type(item.__self__))
    return any(map(holds_iterator, tuple.__iter__(item))) if issubclass(kind, tuple) else is_iterator(kind)


class NoCopy:
    """An object in the place of an iterator that has no copy: to advance it is an error."""

    def __init__(self, kind: type) -> None:
        self._kind = kind

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # a forward that only asks for the class is answered
        return self._kind

    def __iter__(self) -> Any:
        return self

    def __next__(self, *_: Any) -> Any:
        raise UnsupportedError(
            f"The forward of a checkpointed region advances an iterator (`{self._kind.__name__}`) that cannot be copied, "
            "so the recomputation cannot start where the forward did. Use a list and an index instead, or advance the "
            "iterator outside of the region and pass the item."
        )

    send = throw = __next__

    def close(self) -> None:
        """Do nothing: the forward has closed the generator itself."""


def copied(iterator: Any) -> Any:
    """Return an iterator that goes on from where this one is, or a tuple with such.

    Iterators inside of it (`zip`, `chain`) are copied with it, one that is inside twice once. The copy of one that
    cannot be copied is a `NoCopy`.
    """
    return _copied(iterator, {})


def _copied(item: Any, memo: dict[int, Any]) -> Any:
    kind: Any = type(item)
    if issubclass(kind, tuple):
        if not holds_iterator(item):
            return item
        items = [_copied(inner, memo) for inner in tuple.__iter__(item)]
        return tuple(items) if kind is tuple else getattr(kind, "_make", kind)(items)
    if kind is MethodWrapperType and holds_iterator(item):
        return getattr(_copied(item.__self__, memo), item.__name__)
    if not is_iterator(kind):
        return item
    try:
        return _copy_of(item, memo)
    except Exception:  # each class has errors of its own; that it has no copy is refused by name where it matters
        return NoCopy(kind)


def _copy_of(item: Any, memo: dict[int, Any]) -> Any:
    """Return a copy of an iterator, raise if it has none."""
    if id(item) in memo:
        return memo[id(item)][0]
    kind: Any = type(item)
    if kind is GeneratorType and item.gi_frame is None:  # it is used up for good
        found = item
    elif kind.__name__ == "nditer":
        found = item.copy()
    elif kind.__name__ == "flatiter":
        found = _flat_at(item)
    elif hasattr(kind, "__copy__"):  # of `tee`, whose items are shared
        found = copy.copy(item)
    else:
        make, arguments, state = _made_of(item)
        found = make(*[_part_copied(part, memo) for part in arguments])
        if state is not None:
            found.__setstate__(_part_copied(state, memo))
    memo[id(item)] = found, item  # the item, too, since an id is its own only while it lives
    return found


def _made_of(item: Any) -> tuple[Any, tuple[Any, ...], Any]:
    """Return what makes an iterator, with which arguments, and its state or None; raise if it does not say.

    Classes without a method of their own for this raise, in each version of Python.
    """
    make, arguments, state = _reduced(item)
    if type(item) is itertools.cycle:  # which goes on adding to its list
        state = list(state[0]), state[1]
    if type(item).__name__ == "callable_iterator" and arguments and not _is_rewound(arguments[0]):
        raise TypeError("it calls a method that changes what is not noted")
    return make, arguments, state


def _reduced(item: Any) -> tuple[Any, tuple[Any, ...], Any]:
    make, arguments, *rest = cast("tuple[Any, ...]", item.__reduce_ex__(4))
    return make, arguments, rest[0] if rest else None


def _is_rewound(fn: Any) -> bool:
    """Return whether what a function changes is noted: not if it is a method of an object that is not made of Python."""
    if isinstance(fn, functools.partial):
        return _is_rewound(fn.func)
    if type(fn) is not BuiltinFunctionType:
        return hasattr(fn, "__dict__")
    return isinstance(fn.__self__, (ModuleType, NoneType, list, dict, set)) or type(fn.__self__).__name__ == "deque"


def _part_copied(part: Any, memo: dict[int, Any]) -> Any:
    if type(part) is tuple:
        return tuple(_part_copied(inner, memo) for inner in part)
    kind: Any = type(part)
    if is_iterator(kind):
        return _copy_of(part, memo)
    if hasattr(kind, "__next__") and not _is_noted(kind):
        raise TypeError("where an iterator inside of it stands is not noted")
    return part


@cached_by_class
def _is_noted(kind: Any) -> bool:
    """Return whether iterators of this class are rewound in place: in-memory streams, and what is made of Python."""
    is_of_torch = kind.__module__.partition(".")[0] == "torch"
    return kind in (io.StringIO, io.BytesIO) or (type(kind.__next__) is FunctionType and not is_of_torch)


def _flat_at(flat: Any) -> Any:
    if flat.index > _MOST_STEPS:
        raise TypeError("it has gone too far")
    found = flat.base.flat
    for _ in range(flat.index):
        next(found)
    return found


def parts_of(iterator: Any) -> tuple[Any, ...]:
    """Return what an iterator is made of: inner iterators, containers, functions. Nothing if it does not say."""
    try:
        _, arguments, state = _made_of(iterator)
    except Exception:  # whatever its class raises: such an iterator has no copy either
        return ()
    return (*arguments, *state) if type(state) is tuple else (*arguments, state)


def position_of(iterator: Any) -> Any:
    """Return something that compares equal as long as neither the iterator goes on, nor those in a tuple."""
    if isinstance(iterator, tuple):
        return _part_of(tuple(iterator))
    if type(iterator) is MethodWrapperType:
        return position_of(iterator.__self__)
    try:
        _, *parts = _reduced(iterator)
    except Exception:  # it does not say, so it counts as gone on with
        return object()
    if type(iterator).__name__.startswith(("dict_", "odict_", "set_")):  # these list what is left, anew each time
        return [_Same(item) for item in parts[0][0]]
    return [_part_of(part) for part in parts]


class _Same:
    """An object that equals itself only. It is held, since its id could pass to another."""

    __slots__ = ("_item",)

    def __init__(self, item: Any) -> None:
        self._item = item

    def __eq__(self, other: object) -> bool:
        return type(other) is _Same and self._item is other._item

    __hash__ = None  # type: ignore[assignment]


def _part_of(part: Any) -> Any:
    if type(part) is tuple:
        return [_part_of(item) for item in part]
    if holds_iterator(part):
        return position_of(part)
    return part if type(part) is int else _Same(part)

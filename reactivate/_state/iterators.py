"""Iterators: copied, since a function that goes on with one uses it up."""

from __future__ import annotations

import copy
import functools
from types import GeneratorType
from typing import Any, cast


@functools.cache
def is_iterator(kind: Any) -> bool:
    """Return whether objects of this class are iterators that can be copied."""
    is_known = kind.__module__ in ("builtins", "itertools", "collections") and kind is not GeneratorType
    return is_known and hasattr(kind, "__next__")


def holds_iterator(item: Any) -> bool:
    """Return whether this is an iterator, or a tuple with one in it: neither can be rewound in place."""
    kind: Any = type(item)
    return any(map(holds_iterator, item)) if issubclass(kind, tuple) else is_iterator(kind)


def copied(iterator: Any) -> Any:
    """Return an iterator that goes on from where this one is, or a tuple with such.

    One made of others (`zip`) is copied with these.
    """
    if isinstance(iterator, tuple):
        items = [copied(item) if holds_iterator(item) else item for item in iterator]
        return getattr(type(iterator), "_make", type(iterator))(items)
    if not isinstance(iterator, (zip, map, enumerate, filter)):
        return copy.copy(iterator)
    made, arguments, *_ = cast("tuple[Any, ...]", iterator.__reduce__())
    return made(*[copied(item) if holds_iterator(item) else item for item in arguments])


def position_of(iterator: Any) -> Any:
    """Return something that compares equal as long as nobody goes on with the iterator, or with those in a tuple."""
    if isinstance(iterator, tuple):
        return _part_of(tuple(iterator))
    try:
        _, *parts = cast("tuple[Any, ...]", iterator.__reduce__())
    except Exception:  # it does not say
        return object()
    return [_part_of(part) for part in parts]


def _part_of(part: Any) -> Any:
    if type(part) is tuple:
        return [_part_of(item) for item in part]
    if holds_iterator(part):
        return position_of(part)
    return part if type(part) is int else id(part)

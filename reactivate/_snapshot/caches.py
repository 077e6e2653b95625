"""Caches keyed by identity: sets of weakly held objects, and tables of limited size keyed by class or code."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Hashable
from functools import lru_cache
from threading import RLock
from typing import Any, TypeVar
from weakref import ref

MOST = 4096
"""Entries of a cache: more classes and functions than a program has, unless it makes them as it runs."""

_Key = TypeVar("_Key", bound=Hashable)
_Value = TypeVar("_Value")
_Function = TypeVar("_Function", bound=Callable[..., Any])
_adding = RLock()


class BoundedCache(dict[_Key, _Value]):
    """A dict that drops its oldest entry for a new one when it has `MOST`."""

    def __setitem__(self, key: _Key, value: _Value) -> None:
        with _adding:
            while len(self) >= MOST and key not in self:
                del self[next(iter(self))]
            super().__setitem__(key, value)


def cached(function: _Function) -> _Function:
    """Remember what a function returned for its last `MOST` arguments."""
    return lru_cache(maxsize=MOST)(function)  # type: ignore[return-value]


def cached_by_class(function: Callable[[Any], _Value]) -> Callable[[Any], _Value]:
    """Remember what a function returned for a class for as long as the class lives; no result may hold a class."""
    known: dict[int, tuple[_Value, ref[type]]] = {}

    @functools.wraps(function)
    def known_or_found(kind: Any) -> _Value:
        key = id(kind)
        found = known.get(key)
        if found is None:
            found = known[key] = function(kind), ref(kind, lambda _: known.pop(key, None))
        return found[0]

    return known_or_found


class WeakIdentitySet(dict[int, "ref[Any]"]):
    """A set of weakly held objects, compared by identity: a `WeakSet` would compare tensors by their elements.

    It is a dict from ids to references. It is mostly empty, and every region asks it.
    """

    def add(self, item: Any) -> None:
        """Add an object."""
        key = id(item)
        self[key] = ref(item, functools.partial(self.pop, key))

    def has(self, item: Any) -> bool:
        """Return whether this very object was added."""
        reference = self.get(id(item)) if self else None
        return reference is not None and reference() is item


def is_importable(namespace: dict[str, Any]) -> bool:
    """Return whether a namespace is that of an imported Python module: to hold it keeps nothing else alive."""
    module = sys.modules.get(namespace.get("__name__", ""))
    return module is not None and getattr(module, "__dict__", None) is namespace


def is_in_its_module(item: Any) -> bool:
    """Return whether a class or a function is found under its name in a Python module, which holds it anyway."""
    found = sys.modules.get(item.__module__)
    for name in item.__qualname__.split("."):
        names = getattr(found, "__dict__", None)
        found = None if names is None else names.get(name)
    return found is item

"""Containers behind context variables: a recomputation gets copies of what they held.

A collector that appends through a context variable is mostly gone before the backward, and what it holds leads to the graph,
which leads to the region. So a region holds neither the container nor its graph: it holds what was in there, as notes do,
and its own context has nothing in the place of the container. In a recomputation the variable has a new container with the
noted contents, and what is appended goes with it.
"""

from __future__ import annotations

import functools
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

from reactivate._engine.state.contents import Note, is_key
from reactivate._engine.state.held import given_back, is_item

COPIED = frozenset({list, dict, OrderedDict, defaultdict, deque, set})
"""Classes of containers of which a recomputation gets copies."""


class Copied:
    """The contents of a container, or of a tuple with containers in it.

    Args:
        value: the container. It is held until `let_go`.

    Attributes:
        keys: of a dict.
        parts: the items: a `Copied` for each container, anything else as notes hold it.
        original: the container, if a recomputation is to have itself; see `let_go`.
    """

    __slots__ = ("_empty", "_kind", "keys", "original", "parts")

    def __init__(self, value: Any) -> None:
        self._kind: Any = type(value)
        self._empty: Callable[[], Any] = _empty_like(value)
        self.original = value
        self.keys: list[Any] = list(value) if isinstance(value, dict) else []
        self.parts: list[Any] = []

    def let_go(self) -> None:
        """Hold the container no longer."""
        self.original = None

    def is_of(self, value: Any) -> bool:
        """Return whether a container holds just this."""
        return self._is_of(value, set())

    def _is_of(self, value: Any, seen: set[int]) -> bool:
        if id(self) in seen or (value is not None and self.original is value):
            return True
        seen.add(id(self))
        if type(value) is not self._kind or len(value) != len(self.parts):
            return False
        if self.keys and not all(map(is_key, value, self.keys)):
            return False
        items = value.values() if isinstance(value, dict) else value
        return all(
            part._is_of(item, seen) if type(part) is Copied else is_item(item, part)
            for item, part in zip(items, self.parts)
        )

    def copy(self, made: dict[int, Any]) -> Any:
        """Return a container that holds this; one that occurs twice is made once."""
        if self.original is not None:
            return self.original
        if id(self) in made:
            return made[id(self)]
        if issubclass(self._kind, tuple):
            items = self._items(made)
            return tuple(items) if self._kind is tuple else self._kind._make(items)
        found = made[id(self)] = self._empty()
        if isinstance(found, dict):
            found.update(zip(self.keys, self._items(made)))
        elif isinstance(found, set):
            found.update(self._items(made))
        else:
            found.extend(self._items(made))
        return found

    def _items(self, made: dict[int, Any]) -> list[Any]:
        return [part.copy(made) if type(part) is Copied else given_back(part) for part in self.parts]


def _empty_like(value: Any) -> Callable[[], Any]:
    if isinstance(value, deque):
        return functools.partial(deque, maxlen=value.maxlen)
    return functools.partial(defaultdict, value.default_factory) if isinstance(value, defaultdict) else type(value)


class ContextNote(Note):
    """A context variable whose value is a container."""

    __slots__ = ()
    is_shared = False  # a recomputation has a context of its own

    def __init__(self, target: ContextVar[Any], noted: Copied) -> None:
        self.target = target
        self.noted = noted

    @property
    def name(self) -> str:
        """Return how messages call the container."""
        return str(self.target.name)

    def contents(self, weak: bool | None = None) -> Any:
        value = self.target.get(None)
        return value if value is None else [value, *_inside(value, set())]

    def is_at(self, contents: Any) -> bool:
        value = self.target.get(None)
        return contents.is_of(value) if type(contents) is Copied else contents is value

    def put(self, contents: Any) -> None:
        self.target.set(contents.copy({}) if type(contents) is Copied else contents)


def _inside(value: Any, seen: set[int]) -> Iterator[Any]:
    """Yield everything in a container and in those that are in it."""
    kind = type(value)
    if (kind in COPIED or isinstance(value, tuple)) and id(value) not in seen:
        seen.add(id(value))
        for item in (*value, *value.values()) if isinstance(value, dict) else value:
            yield item
            yield from _inside(item, seen)

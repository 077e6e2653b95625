"""Containers with too many items to note them all: what was appended to them is taken off again."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable
from itertools import islice
from typing import Any

from reactivate._snapshot.holders import EMPTY, Contents, Holder, length_of


class LengthHolder(Holder):
    """A container of more than `LARGEST` items, past methods that a subclass overrides.

    Items that were replaced, put in front or taken away stay so: the function sees what torch's checkpoint would show it.
    """

    __slots__ = ("_first", "_length")

    def record(self) -> Contents:
        self._length, self._first = length_of(self.target), self._first_now()
        return (self._length,)

    def _first_now(self) -> Any:
        target = self.target
        is_told = length_of(target) and not isinstance(target, dict)  # a dict puts nothing in front
        return _kind_of(target).__getitem__(target, 0) if is_told else EMPTY

    def get(self) -> Contents:
        """Return the noted length and what came behind it, or all items if some were taken away."""
        target, length = self.target, self._length
        if length_of(target) < length:
            length = 0
        elif self._first_now() is not self._first:
            return (length_of(target),)
        tail: Iterable[Any]
        if isinstance(target, dict):
            tail = [(key, _kind_of(target).__getitem__(target, key)) for key in _keys_from(target, length)]
        else:
            tail = islice(_kind_of(target).__iter__(target), length, None)
        return length, *tail

    def is_at(self, contents: Contents) -> bool:
        return length_of(self.target) == int(contents[0]) + len(contents) - 1

    def put(self, contents: Contents) -> None:
        length, *tail = contents
        target, kind = self.target, _kind_of(self.target)
        if length_of(target) > length and self._first_now() is not self._first:
            return
        if isinstance(target, dict):
            for key in _keys_from(target, length):
                kind.__delitem__(target, key)
            for key, item in tail:
                kind.__setitem__(target, key, item)
        else:
            for _ in range(length_of(target) - length):
                kind.pop(target)
            kind.extend(target, tail)

    def items(self, contents: Contents) -> Iterable[tuple[str, Any]]:
        return ()

    def kept_with(self, contents: Contents) -> None:
        """Return None: each moment has a length of its own."""


def _kind_of(container: Any) -> Any:
    return next(kind for kind in (OrderedDict, dict, deque, list) if isinstance(container, kind))


def _keys_from(container: Any, length: int) -> list[Any]:
    return list(islice(_kind_of(container).__iter__(container), length, None))

"""A quick look whether many objects hold what they held: most of them are asked together, in a few calls of C.

The layer of a large model reaches some sixty dicts, classes, lists and names, which hardly ever change. To ask each of its
holders costs more than all else that is done for a region.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain, repeat
from operator import is_
from types import FunctionType
from typing import Any

from reactivate._snapshot.bindings import CodeHolder
from reactivate._snapshot.held import Position, WeakTensor
from reactivate._snapshot.holders import (
    EMPTY,
    Contents,
    FunctionsHolder,
    Holder,
    KindHolder,
    ListHolder,
    NameHolder,
    VersionedHolder,
    attributes_of,
    made_of,
)
from reactivate._torch.modules import version_of_dict

_HELD_OTHERWISE = frozenset({Position, WeakTensor})
_nothing: dict[Any, Any] = {}
_HAS_VERSIONS = version_of_dict(_nothing) == version_of_dict(_nothing)


def others_among(numbers: Iterable[int], holders: Sequence[Holder], contents: Sequence[Contents]) -> list[int]:
    """Return the numbers, among these, of the objects that hold something else by now."""
    return [number for number in numbers if not holders[number].is_at(contents[number])]


class QuickLook:
    """Some objects, and what they hold now.

    Args:
        holders, contents: the objects and what they hold.
    """

    def __init__(self, holders: Sequence[Holder], contents: Sequence[Contents]) -> None:
        self._holders, self._contents = holders, contents
        self._rest: list[int] = []  # the numbers of those that are asked one by one
        self._dicts: list[dict[Any, Any]] = []
        self._lists: list[list[Any]] = []
        self._items: list[Contents] = []  # of the lists
        self._spaces: list[dict[str, Any]] = []
        self._names: list[str] = []  # in these
        self._values: list[Any] = []  # of the names
        self._functions: list[FunctionType] = []
        self._parts: list[Any] = []  # of the functions
        self._objects: list[Any] = []
        self._kinds: list[type] = []  # of the objects
        for number, (holder, items) in enumerate(zip(holders, contents)):
            if not (_HELD_OTHERWISE.isdisjoint(map(type, items)) and self._takes(holder, items)):
                self._rest.append(number)
        self._versions: list[int] = []  # of the dicts, when all objects were last asked

    def _takes(self, holder: Holder, items: Contents) -> bool:
        """Return whether an object is one of those that are asked together, and add it to these."""
        if isinstance(holder, VersionedHolder) and holder.namespace is not None and _HAS_VERSIONS:
            self._dicts.append(holder.namespace)
        elif type(holder) is ListHolder and type(holder.target) is list:
            self._lists.append(holder.target)
            self._items.append(items)
        elif type(holder) is NameHolder:
            self._spaces.append(holder.target)
            self._names.append(holder.name)
            self._values += items
        elif type(holder) is CodeHolder and holder.closed is holder.functions:
            named = [name for bindings in holder.target for name in bindings.names]
            if len(items) != len(named) + 3 * len(holder.functions):
                return False
            self._spaces += [space for space, _ in named]
            self._names += [name for _, name in named]
            self._values += items[: len(named)]
            self._functions += holder.functions
            self._parts += items[len(named) :]
        elif type(holder) is FunctionsHolder and len(items) == 3 * len(holder.target):  # without attributes
            self._functions += holder.target
            self._parts += items
        elif type(holder) is KindHolder:
            self._objects.append(holder.target)
            self._kinds += items
        else:
            return False
        return True

    def others(self) -> list[int]:
        """Return the numbers of the objects that hold something else by now."""
        versions = list(map(version_of_dict, self._dicts))
        are_most_same = versions == self._versions and self._are_same()
        numbers = self._rest if are_most_same else range(len(self._holders))
        others = others_among(numbers, self._holders, self._contents)
        if not (are_most_same or others):  # something was written that was there
            self._versions = versions
        return others

    def _are_same(self) -> bool:
        """Return whether lists, names and the classes of objects are what they were."""
        return (
            list(map(len, self._lists)) == list(map(len, self._items))
            and all(map(is_, chain.from_iterable(self._lists), chain.from_iterable(self._items)))
            and all(map(is_, map(dict.get, self._spaces, self._names, repeat(EMPTY)), self._values))
            and all(map(is_, chain.from_iterable(map(made_of, self._functions)), self._parts))
            and not any(map(attributes_of, self._functions))
            and all(map(is_, map(type, self._objects), self._kinds))
        )

"""Side effects of a saved call on the objects that it can reach.

A recomputation skips a saved call, and with it what the call did to a list, a cache or a tensor that it was given or
closes over. So everything reachable from the arguments and closures is noted when the call begins and compared, item by
item and by identity, when it returns. A call that changes any of it is recomputed, unless the region
has noted what it changes and the change can be brought about without the call (see `_engine/state/changes`). Modules and
generators are left out: the guards see to them.
"""

from __future__ import annotations

import functools
import random
import sys
from collections import deque
from collections.abc import Iterator
from enum import Enum
from operator import attrgetter, is_
from sys import _getframe
from types import BuiltinFunctionType, CellType, FrameType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from reactivate._engine.kept_calls.results import attributes_of, is_plain
from reactivate._engine.state.changes import Noted
from reactivate._engine.state.contents import ATOMS
from reactivate._engine.state.iterators import is_iterator, position_of
from reactivate._torch.collectives import Work, arrived

LIMIT = 1_000  # of items: a call that is given more is not worth the look
_VERSION = attrgetter("_version")
_TOO_MUCH = f"more than {LIMIT} objects, too many to see whether it changes one"
_SIZED = (tuple, list, set, frozenset, deque, dict)


class Reached:
    """Everything that a call can reach through its arguments and closures, as it is when the call begins.

    Args:
        fn: what is called.
        given: the arguments.
        noted: what the region has noted: changes of that are brought about where the call is skipped.
    """

    __slots__ = ("_closed_over", "_fn", "_given", "_memory", "_noted", "_versions")

    def __init__(self, fn: Any, given: Any, noted: Noted) -> None:
        self._noted = noted
        self._fn = fn
        self._closed_over = _SideEffects(fn)
        self._given = _SideEffects(given)
        self._versions = versions_of(self.tensors())
        self._memory = list(map(_memory_of, self.tensors()))

    def change(self) -> str | None:
        """Say what the call may have done to any of it; None if nothing."""
        if self._given.unclear is not None:
            return self._given.unclear
        if self._closed_over.is_too_large:
            return f"it closes over {_TOO_MUCH}"
        if self._versions is None or self._versions != versions_of(self.tensors()):
            return "it writes into its arguments or into what it closes over"
        if self._memory != list(map(_memory_of, self.tensors())):
            return "it gives a tensor other memory (`.data = ...`)"
        changed = next(self._given.changed(), None)
        if changed is not None:
            return f"it changes a {type(changed).__name__} that it was given"
        if self._closed_over.advanced():
            return "it goes on with an iterator that it closes over"
        found = list(self._closed_over.changed())
        if found:
            noted = self._noted.targets()
            changed = next((item for item in found if id(item) not in noted and _is_of_this_call(item)), None)
            if changed is not None:
                return f"it changes a {type(changed).__name__} that it closes over"
        if not _are_same(_SideEffects(self._fn).tensors, self._closed_over.tensors):
            return "it leaves a tensor in what it closes over"
        return None

    def tensors(self) -> list[Tensor]:
        """Return every tensor that the call can reach, but for those of modules."""
        return self._closed_over.tensors + self._given.tensors


class _SideEffects:
    """The objects that a value leads to, without modules and generators.

    Attributes:
        tensors: all of them, each once.
        unclear: what may change without being seen, in words; None if there is nothing.
        is_too_large: whether the walk has ended early.
    """

    __slots__ = ("_count", "_iterators", "_notes", "_seen", "is_too_large", "tensors", "unclear")

    def __init__(self, value: Any) -> None:
        self._notes: list[tuple[Any, list[Any]]] = []
        self._iterators: list[tuple[Any, Any]] = []
        self._seen: set[int] = set()
        self._count = 0
        self.tensors: list[Tensor] = []
        self.unclear: str | None = None
        self.is_too_large = False
        self._visit(value)

    def changed(self) -> Iterator[Any]:
        """Return the objects that do not hold what they held."""
        for value, noted in self._notes:
            items = _items(value)
            if items is None or not _are_same(items, noted):
                yield value

    def has_seen(self, value: Any) -> bool:
        """Return whether the walk came to `value`, or would have."""
        return self.is_too_large or id(value) in self._seen

    def advanced(self) -> bool:
        """Return whether an iterator is not where it was."""
        return any(position_of(iterator) != position for iterator, position in self._iterators)

    def _visit(self, value: Any) -> None:
        kind = type(value)
        if kind in ATOMS or self.is_too_large or id(value) in self._seen:
            return
        self._seen.add(id(value))
        if isinstance(value, Tensor):
            self.tensors.append(value)
        elif not _is_looked_after(value, kind):
            self._note(value, kind)

    def _note(self, value: Any, kind: type) -> None:
        if is_iterator(kind):
            self._iterators.append((value, position_of(value)))
        is_large = isinstance(value, _SIZED) and len(value) > LIMIT
        items = [] if is_large else _items(value)
        if items is None:
            if kind.__module__.partition(".")[0] != "torch" or isinstance(value, Work):  # it may wait for a collective
                self.unclear = f"it is given a {kind.__name__}, which it may change unseen"
            return
        self._count += len(items)
        if is_large or self._count > LIMIT:
            self.is_too_large = True
            self.unclear = f"it is given {_TOO_MUCH}"
            return
        if kind is not tuple:
            self._notes.append((value, items))
        for item in items:
            self._visit(item)


def _is_of_this_call(value: Any) -> bool:
    """Return whether a function that is running inside of the region can reach `value`.

    Then it may have made it, and a recomputation makes it anew. What else has no note is not rewound either.
    """
    frame: FrameType | None = _getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name in _AROUND_REGIONS:
            return False
        if name.partition(".")[0] not in ("reactivate", "torch"):
            local = list(frame.f_locals.values())
            if type(value) is CellType:
                if any(item is part for item in local for part in _items(value) or ()):
                    return True
            elif _SideEffects(local).has_seen(value):
                return True
        frame = frame.f_back
    return False


_AROUND_REGIONS = tuple(f"reactivate._engine.{name}" for name in ("run", "region", "recompute"))


def _are_same(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(map(is_, one, other))


def versions_of(tensors: list[Tensor]) -> list[int] | None:
    """Their version counters, None if one has none: writes into a tensor made in inference mode are not counted.

    Those of tensors that a collective is filling are read when it is done, so that every rank reads the same.
    """
    try:
        return list(map(_VERSION, arrived(tensors)))
    except RuntimeError:
        return None


def _memory_of(tensor: Tensor) -> Any:
    """The storage of a tensor, None if it has none of its own, as sparse ones."""
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return None


def _items(value: Any) -> list[Any] | None:
    """Return what is in a container, an object or a function; None if that cannot be seen."""
    kind: Any = type(value)
    if issubclass(kind, _SIZED) and not issubclass(kind, dict):
        return [*value, *_attributes(value)]
    if issubclass(kind, dict):
        return [*dict.keys(value), *dict.values(value), *_attributes(value)]
    if kind is FunctionType:
        return [*(value.__closure__ or ()), *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
    if kind is CellType:
        try:
            return [value.cell_contents]
        except ValueError:  # nothing yet
            return []
    if kind is MethodType:
        return [value.__self__, value.__func__]
    if isinstance(value, functools.partial):
        return [value.func, value.args, value.keywords]
    return _attributes(value) if is_plain(kind) else None


def _attributes(value: Any) -> list[Any]:
    return list(attributes_of(value).values())


def _is_looked_after(value: Any, kind: type) -> bool:
    """Return whether a value cannot change, or a guard sees to it, or it is this package's own."""
    if isinstance(value, (Module, Enum, type, BuiltinFunctionType, torch.Generator, random.Random)):
        return True
    if kind.__module__.partition(".")[0] == "reactivate":  # regions and their options, which know how often they ran
        return True
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, (numpy.random.Generator, numpy.random.RandomState))

"""Trees of modules that were walked before: what a walk found holds for as long as it would find the same.

To look whether the modules are still made of the same parts costs less than to walk over them. A tree is remembered only
if values that cannot change and objects that hold nothing else are all that its modules have besides tensors and children.
These are remembered weakly: what nobody else has goes, and the tree is forgotten.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Container, Iterable, Sequence
from enum import Enum
from itertools import chain
from logging import Logger
from operator import is_
from types import BuiltinFunctionType, FunctionType, ModuleType, NoneType
from typing import Any, NamedTuple
from weakref import ref

from torch.nn import Module

from reactivate._engine.state.attributes import KindNote, TensorsNote
from reactivate._engine.state.bounded import is_for_good, is_in_its_module
from reactivate._engine.state.code import CACHED, CodeNote, are_closed
from reactivate._engine.state.contents import ATOMS, DictNote, ListNote, Note, SetNote
from reactivate._engine.state.functions import CellNote, ClassNote, FunctionNote, Inside, NameNote, PartialNote
from reactivate._engine.state.parts import Parts
from reactivate._modules.standin import Cover
from reactivate._torch.flags import ask
from reactivate._torch.modules import GLOBAL_FORWARD_HOOKS

_MOST_MISSES = 4  # in a row, after which it is not tried any more: attributes change with every call, or hold too much


def _are_hooked(parts: Parts) -> bool:
    """Return whether hooks run in a forward: what they close over is looked at in each."""
    return any(parts.stamp.forward_hooks) or any(GLOBAL_FORWARD_HOOKS)


class Walked(NamedTuple):
    """The result of a walk over a tree.

    Attributes:
        modules: every module, outermost first.
        notes: of objects in attributes, of classes and of module-level names.
        parts: what the modules are made of.
        names: what code that they lead to names.
    """

    modules: Sequence[Module]
    notes: list[Note]
    parts: Parts
    names: Any


class _Tree:
    """One remembered tree."""

    __slots__ = (
        *("are_empty", "attributes", "children", "covers", "kinds", "layout", "modules", "names", "notes"),
        "versions",
    )

    def __init__(self, walked: Walked, forget: Any) -> None:
        modules, notes, parts, self.names = walked
        self.modules = [ref(module, forget) for module in modules]
        self.kinds = list(map(type, modules))
        self.are_empty = [entry is None for entry in parts.entries]
        self.children = list(
            map(id, parts.layout.children_in(parts.entries))
        )  # of modules: they live, or it is forgotten
        self.layout, self.notes = parts.layout, notes
        covers = {index: ref(item) for index, item in enumerate(parts.attributes) if isinstance(item, Cover)}
        self.attributes = [None if index in covers else item for index, item in enumerate(parts.attributes)]
        self.covers = covers
        self.versions = parts.stamp.versions

    def again(self) -> Walked | None:
        """Return what a walk would find now, None if that is not known."""
        modules: list[Any] = list(map(ask, self.modules))
        if list(map(type, modules)) != self.kinds:
            return None
        namespaces: list[Any] = list(map(vars, modules))
        stamp = self.layout.stamp_of(namespaces)
        if stamp.versions is not None and stamp.versions == self.versions:
            found = self._attributes(), stamp.entries()
        else:
            compared = self._compared(namespaces)
            if compared is None:
                return None
            found, self.versions = compared, stamp.versions
        parts = Parts(namespaces, self.layout, found, stamp)
        if _are_hooked(parts):
            return None
        for note in self.notes:
            if not note.is_at(note.noted):
                return None
        return Walked(modules, self.notes, parts, self.names)

    def _attributes(self) -> list[Any]:
        """Return the attributes. What covers a `forward` is held weakly: its policy may lead to the model."""
        if not self.covers:
            return self.attributes
        found = self.attributes.copy()
        for index, reference in self.covers.items():
            found[index] = reference()
        return found

    def _compared(self, namespaces: Sequence[dict[str, Any]]) -> tuple[list[Any], list[Any]] | None:
        """Return (attributes, entries) of the modules, None if they are not what they were."""
        found = self.layout.parts_of(namespaces)
        if found is None:
            return None
        attributes, entries = found
        if list(map(id, self.layout.children_in(entries))) != self.children:
            return None
        if [entry is None for entry in entries] != self.are_empty or not all(map(is_, attributes, self._attributes())):
            return None
        return found


class Trees:
    """Remembered trees, by the ids of their roots."""

    def __init__(self) -> None:
        self._trees: dict[int, _Tree] = {}
        self._misses: dict[int, tuple[ref[Module], int]] = {}  # how many there were in a row

    def again(self, root: Module) -> Walked | None:
        """Return what a walk over the tree under `root` would find now, None if that is not known."""
        key = id(root)
        tree = self._trees.get(key)
        if tree is None:
            return None
        walked = tree.again()
        if walked is None:
            self._trees.pop(key, None)
            self._miss(root)
        elif self._misses:
            self._misses.pop(key, None)
        return walked

    def _miss(self, root: Module) -> None:
        key = id(root)
        self._misses[key] = ref(root, functools.partial(self._misses.pop, key)), self._misses_of(root) + 1

    def _misses_of(self, root: Module) -> int:
        reference, count = self._misses.get(id(root), (None, 0))
        return count if reference is not None and reference() is root else 0

    def remember(self, root: Module, modules: Sequence[Module], notes: list[Note], names: Callable[[], Any]) -> None:
        """Remember what a walk over the tree under `root` found, if that can be.

        Args:
            root, modules, notes: the tree, its modules, and notes of what they lead to.
            names: returns what code that they lead to names.
        """
        if self._misses_of(root) >= _MOST_MISSES:
            return
        walked = Walked(modules, notes, Parts([module.__dict__ for module in modules]), None)
        if _are_hooked(walked.parts):
            return
        if _holds_nothing_else(walked):
            key, trees = id(root), self._trees
            trees[key] = _Tree(walked._replace(names=names()), lambda _: trees.pop(key, None))
        else:
            self._miss(root)


whole_trees = Trees()
single_modules = Trees()
"""Modules without what is inside of them: those of large trees (see `reaching`)."""


# -- what can be held -------------------------------------------------------------------------------------------------


def _holds_nothing_else(walked: Walked) -> bool:
    """Return whether to hold attributes and notes is to hold no module and no tensor, whatever happens to the tree."""
    noted = {id(note.target) for note in walked.notes}
    items = chain(walked.parts.attributes, *map(_items_of, walked.notes))
    return all(id(item) in noted or _is_fixed(item, noted) or _covers_nothing(item) for item in items)


def _covers_nothing(item: Any) -> bool:
    return isinstance(item, Cover) and not item.hides_users


def _items_of(note: Note) -> Iterable[Any]:
    if isinstance(note, ClassNote):  # what a class holds that is there for good is not held by the tree
        return (note.target,)
    if isinstance(note, FunctionNote):
        _, defaults, keywords, attributes = note.noted
        return (note.target, *(defaults or ()), *(keywords or {}).values(), *attributes.values())
    if isinstance(note, PartialNote):
        function, arguments, keywords, attributes = note.noted
        return (function, arguments, keywords, *attributes.values())
    if isinstance(note, CodeNote):
        if not all(is_for_good(namespace) for bindings in note.target for namespace, _ in bindings.names):
            return (note,)
        holders = [item for item in note.noted if isinstance(item, (BuiltinFunctionType, CACHED))]
        return [*holders, *(fn for fn in note.functions if not are_closed([fn]))]
    if isinstance(note, CellNote):
        return _items_of_cell(note.noted)
    if isinstance(note, TensorsNote):
        return chain.from_iterable(attributes.values() for attributes in note.noted or ())
    if isinstance(note, NameNote):
        return (note.noted,) if is_for_good(note.target) else (note,)
    if isinstance(note, KindNote):
        return (note.noted,)
    if isinstance(note, DictNote):
        return (*note.noted, *note.noted.values())
    return note.noted if isinstance(note, (ListNote, SetNote)) else (note,)


def _items_of_cell(noted: Any) -> Iterable[Any]:
    if type(noted) is not Inside:
        return (noted,)
    return (*noted.items, *noted.items.values()) if isinstance(noted.items, dict) else noted.items


def _is_fixed(item: Any, noted: Container[int] = ()) -> bool:
    """Return whether to hold an item is to hold nothing that could go, but for what is noted."""
    kind = type(item)
    if isinstance(item, type):
        return is_in_its_module(item)
    if kind is FunctionType:
        return is_in_its_module(item) or _leads_nowhere(item)
    if kind is BuiltinFunctionType:
        return isinstance(item.__self__, (ModuleType, NoneType))
    if kind is CACHED:
        return is_in_its_module(item)
    if kind is tuple or kind is frozenset:
        return all(id(inner) in noted or _is_fixed(inner, noted) for inner in item)
    if kind is Logger:
        return item.manager.loggerDict.get(item.name) is item
    return kind in ATOMS or (isinstance(item, Enum) and is_in_its_module(kind))


def _leads_nowhere(fn: FunctionType) -> bool:
    """Return whether a function is there for good and holds nothing itself, and not made by one that may be called again."""
    return (
        fn.__closure__ is None and not fn.__dict__ and is_for_good(fn.__globals__) and "<locals>" not in fn.__qualname__
    )

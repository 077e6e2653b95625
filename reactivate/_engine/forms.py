"""Forms: what `capture` makes of a value, and how a replay makes the value again.

A value that cannot change is its own form. A tensor's form is a saved tensor of autograd's own. Everything else that is
rebuilt has a class here; in one replay every occurrence of a form gives one and the same object, so that `k is v`
holds in the replay where it held in the forward pass.
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from types import CellType, FunctionType, MethodType
from typing import Any

from torch import Tensor

from reactivate._compat import SavedTensor, copy_unseen

Memo = dict[int, Any]
Children = Iterator[tuple[str, Any]]


def rebuild(form: Any, memo: Memo) -> Any:
    """The value of `form` for the replay that `memo` belongs to.

    Raises:
        RuntimeError: autograd's own, where a tensor was written to since.
    """
    if type(form) is SavedTensor:
        key = id(form)
        if key not in memo:
            memo[key] = form.unpack()
        return memo[key]
    if not isinstance(form, Form):
        return form
    key = id(form)
    return memo[key] if key in memo else form.rebuild(memo)


class Form:
    """Something that is rebuilt for each replay."""

    __slots__ = ()

    def rebuild(self, memo: Memo) -> Any:
        """Make the value and note it in `memo`, before its parts where these may point back at it."""
        raise NotImplementedError

    def children(self) -> Children:
        """(how the part is written after the whole, its form), for error messages."""
        return iter(())


class Shared(Form):
    """A container or variable that the replay may share with the function, as long as there is no tensor in it."""

    __slots__ = ("shared",)
    shared: Any  # None: not shared

    def holds_tensor(self) -> bool:
        """Whether there is one in it now."""
        raise NotImplementedError

    def settle(self) -> None:
        """After the forward pass: what it put a tensor into is state of a forward pass, not a side effect."""
        if self.holds_tensor():
            self.shared = None


class StatisticForm(Form):
    """A tensor that an op may write to without a new version, such as a running mean: a replay gets a copy of its own."""

    __slots__ = ("copy",)

    def __init__(self, tensor: Tensor) -> None:
        self.copy = copy_unseen(tensor)

    def rebuild(self, memo: Memo) -> Tensor:
        tensor = memo[id(self)] = copy_unseen(self.copy)
        return tensor


# -- containers -----------------------------------------------------------------------------------------------------


class ListForm(Shared):
    """A list, or an object of a subclass of it."""

    __slots__ = ("attributes", "items", "kind")
    items: list[Any]
    attributes: dict[str, Any] | None

    def __init__(self, kind: Any) -> None:
        self.kind = kind
        self.shared = None

    def holds_tensor(self) -> bool:
        return any(isinstance(item, Tensor) for item in self.shared)

    def rebuild(self, memo: Memo) -> list[Any]:
        if self.shared is not None:
            return self.shared  # type: ignore[no-any-return]
        new: list[Any] = self.kind.__new__(self.kind)
        memo[id(self)] = new
        list.extend(new, [rebuild(item, memo) for item in self.items])
        _set_attributes(new, self.attributes, memo)
        return new

    def children(self) -> Children:
        return _indexed(self.items)


class DictForm(Shared):
    """A dict, or an object of a subclass of it."""

    __slots__ = ("attributes", "items", "kind")
    items: list[tuple[Any, Any]]
    attributes: dict[str, Any] | None

    def __init__(self, kind: Any) -> None:
        self.kind = kind
        self.shared = None

    def holds_tensor(self) -> bool:
        return any(isinstance(item, Tensor) for item in dict.values(self.shared))

    def rebuild(self, memo: Memo) -> dict[Any, Any]:
        if self.shared is not None:
            return self.shared  # type: ignore[no-any-return]
        new: dict[Any, Any] = self.kind.__new__(self.kind)
        memo[id(self)] = new
        put: Callable[..., None] = OrderedDict.__setitem__ if isinstance(new, OrderedDict) else dict.__setitem__
        for key, item in self.items:
            put(new, key, rebuild(item, memo))
        _set_attributes(new, self.attributes, memo)
        return new

    def children(self) -> Children:
        for key, item in self.items:
            yield f"[{key!r}]", item


class TupleForm(Form):
    """A tuple with something in it that is rebuilt, or a named tuple."""

    __slots__ = ("items", "kind")

    def __init__(self, kind: type, items: list[Any]) -> None:
        self.kind = kind
        self.items = items

    def rebuild(self, memo: Memo) -> Any:
        items = [rebuild(item, memo) for item in self.items]
        make = getattr(self.kind, "_make", self.kind)  # a named tuple's class takes its fields one by one
        new = memo[id(self)] = make(items)
        return new

    def children(self) -> Children:
        return _indexed(self.items)


class RegisteredForm(Form):
    """A container that its library registered with torch's pytrees."""

    __slots__ = ("context", "items", "unflatten")
    items: list[Any]

    def __init__(self, unflatten: Callable[[Any, Any], Any], context: Any) -> None:
        self.unflatten = unflatten
        self.context = context

    def rebuild(self, memo: Memo) -> Any:
        new = memo[id(self)] = self.unflatten([rebuild(item, memo) for item in self.items], self.context)
        return new

    def children(self) -> Children:
        return _indexed(self.items)


class CopyForm(Form):
    """A set or an iterator: copied, not looked into."""

    __slots__ = ("original",)

    def __init__(self, original: Any) -> None:
        self.original = copy.copy(original)

    def rebuild(self, memo: Memo) -> Any:
        new = memo[id(self)] = copy.copy(self.original)
        return new


class ObjectForm(Form):
    """An object of a Python class: rebuilt with the attributes it had.

    One whose attributes cannot change in themselves (a sentinel, a handle, a frozen config) is given as it is, as long
    as nobody assigned to them: there identity matters more than a copy.
    """

    __slots__ = ("attributes", "kind", "original")
    attributes: dict[str, Any]

    def __init__(self, kind: type) -> None:
        self.kind = kind
        self.original: Callable[[], Any] = _nothing

    def is_given_as_is(self, value: Any) -> None:
        """Give `value` itself, as long as its attributes are what they were."""
        self.original = weakref.ref(value) if self.kind.__weakrefoffset__ else lambda: value

    def rebuild(self, memo: Memo) -> Any:
        original = self.original()
        if original is not None and self._is_unchanged(original):
            return original
        new: Any = object.__new__(self.kind)
        memo[id(self)] = new
        _set_attributes(new, self.attributes, memo)
        return new

    def _is_unchanged(self, original: Any) -> bool:
        now = attributes_of(original)
        return now.keys() == self.attributes.keys() and all(now[name] is it for name, it in self.attributes.items())

    def children(self) -> Children:
        for name, form in self.attributes.items():
            yield f".{name}", form


def attributes_of(value: Any) -> dict[str, Any]:
    """The attributes of an object, in its `__dict__` or in slots."""
    attributes = dict(getattr(value, "__dict__", ()))
    for name in slots_of(type(value)):  # type: ignore[arg-type]
        if hasattr(value, name):
            attributes[name] = getattr(value, name)
    return attributes


@functools.cache
def slots_of(kind: type) -> tuple[str, ...]:
    """The slots of a class and its bases."""
    names: list[str] = []
    for base in kind.__mro__:
        slots = base.__dict__.get("__slots__", ())
        names += [slots] if isinstance(slots, str) else slots
    return tuple(name for name in names if name not in ("__dict__", "__weakref__"))


def _set_attributes(new: Any, attributes: dict[str, Any] | None, memo: Memo) -> None:
    for name, form in (attributes or {}).items():
        object.__setattr__(new, name, rebuild(form, memo))  # past a frozen dataclass's own


def _nothing() -> None:
    return None


def _indexed(items: list[Any]) -> Children:
    for index, item in enumerate(items):
        yield f"[{index}]", item


# -- callables ------------------------------------------------------------------------------------------------------


class CellForm(Shared):
    """A closed-over variable. Functions that share one in the forward pass share one in the replay."""

    __slots__ = ("contents", "is_empty")
    contents: Any

    def __init__(self) -> None:
        self.contents = None
        self.is_empty = False
        self.shared = None

    def holds_tensor(self) -> bool:
        try:
            return isinstance(self.shared.cell_contents, Tensor)
        except ValueError:  # nothing
            return False

    def rebuild(self, memo: Memo) -> CellType:
        """A cell that is still empty: what is in it may be the very function that closes over it."""
        cell: CellType = CellType() if self.shared is None else self.shared
        memo[id(self)] = cell
        return cell

    def fill(self, memo: Memo) -> None:
        """Give the cell of this replay its contents."""
        if self.shared is None and not self.is_empty:
            memo[id(self)].cell_contents = rebuild(self.contents, memo)


class FunctionForm(Form):
    """A Python function with a closure or defaults: made anew around what these held.

    So a loop variable that moved on since reads as it did.
    """

    __slots__ = ("attributes", "cells", "code", "defaults", "keywords", "name", "namespace", "qualified_name")
    cells: list[CellForm] | None
    defaults: Any
    keywords: Any

    def __init__(self, fn: FunctionType) -> None:
        self.code = fn.__code__
        self.namespace = fn.__globals__
        self.name = fn.__name__
        self.qualified_name = fn.__qualname__
        self.attributes = fn.__dict__
        self.cells = None

    def rebuild(self, memo: Memo) -> FunctionType:
        unfilled = [form for form in self.cells or () if id(form) not in memo]
        cells = None if self.cells is None else tuple(rebuild(form, memo) for form in self.cells)
        new = memo[id(self)] = FunctionType(self.code, self.namespace, self.name, None, cells)
        for form in unfilled:
            form.fill(memo)
        new.__defaults__ = rebuild(self.defaults, memo)
        new.__kwdefaults__ = rebuild(self.keywords, memo)
        new.__qualname__ = self.qualified_name
        new.__dict__ = self.attributes
        return new

    def children(self) -> Children:
        for name, cell in zip(self.code.co_freevars, self.cells or ()):
            yield f" (closed over as `{name}`)", cell.contents
        yield " (defaults)", self.defaults
        yield " (defaults)", self.keywords


class MethodForm(Form):
    """A bound method of an object that is rebuilt."""

    __slots__ = ("function", "owner")

    def __init__(self, function: Any, owner: Any) -> None:
        self.function = function
        self.owner = owner

    def rebuild(self, memo: Memo) -> Any:
        owner = rebuild(self.owner, memo)
        if isinstance(self.function, str):  # a method in C, of a tensor
            return getattr(owner, self.function)
        new = memo[id(self)] = MethodType(rebuild(self.function, memo), owner)
        return new

    def children(self) -> Children:
        yield ".__self__", self.owner
        yield "", self.function


class PartialForm(Form):
    """A `functools.partial`."""

    __slots__ = ("arguments", "function", "keywords", "kind")

    def __init__(self, kind: type, function: Any, arguments: Any, keywords: Any) -> None:
        self.kind = kind
        self.function = function
        self.arguments = arguments
        self.keywords = keywords

    def rebuild(self, memo: Memo) -> Any:
        function, arguments = rebuild(self.function, memo), rebuild(self.arguments, memo)
        new = memo[id(self)] = self.kind(function, *arguments, **rebuild(self.keywords, memo))
        return new

    def children(self) -> Children:
        yield ".func", self.function
        yield ".args", self.arguments
        yield ".keywords", self.keywords

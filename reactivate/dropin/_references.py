"""Every reference to an object, found by the garbage collector and made one to another object.

A look for what refers to an object goes through the whole heap (0.1 s for a million objects), so all objects are
looked for at once. Found are namespaces of modules and classes, attributes, dicts, lists, closures, default arguments
and `functools.partial`s; a tuple or a `staticmethod` cannot be written to, so another one takes its place in turn. Not
found are local variables of functions that are running.
"""

from __future__ import annotations

import functools
import gc
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from types import CellType, FunctionType, MemberDescriptorType
from typing import Any

from torch.autograd.function import BackwardCFunction

_Successors = dict[int, Any]  # {id of an object: what takes its place}


@dataclass(frozen=True, slots=True)
class Swap:
    """An object, and what takes its place."""

    old: Any
    new: Any


def replace_everywhere(swaps: Iterable[Swap]) -> list[Swap]:
    """Let every reference to an old object be one to its new one.

    Returns:
        The swaps, and those of tuples and the like that came with them. The same backwards puts the very objects back
        that were there.
    """
    done: list[Swap] = []
    todo = list(swaps)
    while todo:
        done += todo
        todo = _replace(todo, {id(swap.old) for swap in done} | {id(swap.new) for swap in done})
    return done


def backwards(swaps: Iterable[Swap]) -> list[Swap]:
    """Swaps that take these back."""
    return [Swap(swap.new, swap.old) for swap in swaps]


def _replace(swaps: list[Swap], own: set[int]) -> list[Swap]:
    """Write to whatever refers to one of the objects; return the swaps of what cannot be written to."""
    successors = {id(swap.old): swap.new for swap in swaps}
    sought = tuple(swap.old for swap in swaps)
    own = own | {id(sought)}  # Python 3.13 finds the arguments of the call, too
    holders = gc.get_referrers(*sought)
    classes = _classes_of([holder for holder in holders if isinstance(holder, dict)])
    made = []
    for holder in holders:
        if id(holder) in own or type(holder).__module__.startswith("reactivate."):
            continue  # a region that exists goes on with what it began with
        if isinstance(holder, tuple):
            made.append(Swap(holder, tuple.__new__(type(holder), [successors.get(id(item), item) for item in holder])))
        elif isinstance(holder, staticmethod):
            made.append(Swap(holder, staticmethod(successors[id(holder.__func__)])))
        else:
            _write(holder, successors, classes)
    return made


def _classes_of(namespaces: list[dict[Any, Any]]) -> dict[int, type]:
    """{id of a namespace: the class that it belongs to}."""
    candidates = [namespace for namespace in namespaces if "__module__" in namespace]  # as that of a class always is
    if not candidates:
        return {}
    owners = [owner for owner in gc.get_referrers(*candidates) if isinstance(owner, type)]
    return {id(part): owner for owner in owners for part in gc.get_referents(owner) if isinstance(part, dict)}


def _write(holder: Any, successors: _Successors, classes: dict[int, type]) -> None:
    if isinstance(holder, dict):
        _write_items(holder, successors, classes.get(id(holder)))
    elif isinstance(holder, (list, deque)):
        for index, item in enumerate(holder):
            if id(item) in successors:
                holder[index] = successors[id(item)]
    elif isinstance(holder, CellType):
        holder.cell_contents = successors[id(holder.cell_contents)]
    elif isinstance(holder, functools.partial):
        function, arguments = (successors.get(id(part), part) for part in (holder.func, holder.args))
        holder.__setstate__((function, arguments, holder.keywords, holder.__dict__))  # type: ignore[attr-defined]
    elif isinstance(holder, FunctionType):
        holder.__defaults__ = successors.get(id(holder.__defaults__), holder.__defaults__)
    elif not isinstance(holder, type):
        _write_attributes(holder, successors)


def _write_items(holder: dict[Any, Any], successors: _Successors, owner: type | None) -> None:
    if owner is not None and issubclass(owner, BackwardCFunction):
        return  # it is how graphs that exist find their `autograd.Function`
    for key, value in list(dict.items(holder)):
        if id(value) in successors:
            if owner is None:
                dict.__setitem__(holder, key, successors[id(value)])
            else:
                type.__setattr__(owner, key, successors[id(value)])  # a class has caches, so it has to be told


def _write_attributes(holder: Any, successors: _Successors) -> None:
    """Replace references in slots, and those that Python keeps in the object until its `__dict__` is asked for."""
    with suppress(AttributeError):
        _write_items(object.__getattribute__(holder, "__dict__"), successors, None)
    for kind in type(holder).__mro__:
        for member in vars(kind).values():
            if isinstance(member, MemberDescriptorType):
                with suppress(AttributeError):  # an empty slot, or one of C's that cannot be written
                    value = member.__get__(holder)
                    if id(value) in successors:
                        member.__set__(holder, successors[id(value)])

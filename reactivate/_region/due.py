"""The calls of each region, counted by code and module: the 1st, 2nd, 4th, 8th, ... is compared with its recomputation."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any
from weakref import ref

from torch.nn import Module

from reactivate._snapshot.caches import BoundedCache


class Calls:
    """The calls of one region.

    Attributes:
        counts: lists of one number, by the number of the policy: how many calls there were with it.
        is_writer: whether one wrote to a tensor of which there was no copy.
    """

    __slots__ = ("counts", "is_writer")

    def __init__(self) -> None:
        self.counts: BoundedCache[int, list[int]] = BoundedCache()
        self.is_writer = False


_calls: dict[tuple[int, int], tuple[ref[Any], ref[Any], Calls]] = {}
"""By the ids of an owner, mostly a module, and of code, with references to both: an entry goes with the first of them."""


def is_due(call: Any, check: str, choice: Any) -> bool:
    """Return whether checksums are taken in this call of a region: for a comparison, or for a proof if one is needed.

    With "first" they are in the 1st, 2nd, 4th, 8th, ... call, and but for "none" in every call if an earlier one needed a
    proof. Functions, partials and objects may be made anew for each call: those of one code over one module count together.

    Args:
        call: its function and the modules that this reaches.
        check: as given to `checkpoint`.
        choice: of the policy, if there is one.
    """
    if check != "first":
        return check == "every" or (check == "metadata" and _calls_of(call).is_writer)
    calls, policy = _calls_of(call), 0 if choice is None else choice.number
    count = calls.counts.get(policy)
    if count is None:
        count = calls.counts[policy] = [0]
    number = count[0] = count[0] + 1
    return calls.is_writer or not number & (number - 1)


@contextmanager
def uncounted() -> Iterator[None]:
    """Put the numbers of calls back afterwards: those that a tool makes meanwhile are no steps of a training."""
    before = {id(calls): (calls, _numbers(calls)) for _, _, calls in _calls.copy().values()}
    try:
        yield
    finally:
        for _, _, calls in _calls.copy().values():
            calls.counts.clear()
            if id(calls) in before:
                calls.counts.update((policy, [number]) for policy, number in before[id(calls)][1].items())


def _numbers(calls: Calls) -> dict[int, int]:
    return {policy: count[0] for policy, count in calls.counts.copy().items()}


def note_writer(call: Any) -> None:
    """Compare every call of this region from the next one on."""
    _calls_of(call).is_writer = True


def owner_of(fn: Any) -> Any:
    """Return the module whose call, method or partial a function is; or else its code, or the object that it is."""
    module = _module_in(fn)
    return _owner_and_code(fn)[0] if module is None else module


def _calls_of(call: Any) -> Calls:
    fn, roots = call.fn, call.roots
    owner: Any
    code: Any
    if isinstance(fn, Module):
        owner, code = fn, type(fn)
    elif not roots and type(fn) is FunctionType:
        owner = code = fn.__code__
    else:
        owner, code = _owner_and_code(fn)
        if len(roots) == 1:
            owner = roots[0]
        elif roots:
            bound = _module_in(fn)
            if bound is not None:
                owner = bound
            elif not isinstance(owner, Module):
                owner = next(item for item in (*call.args, *roots) if issubclass(type(item), Module))
    key = id(owner), id(code)
    entry = _calls.get(key)  # of these two: the entry goes with them, before another object gets the id
    if entry is None:
        forget = functools.partial(_calls.pop, key)
        entry = _calls[key] = ref(owner, forget), ref(code, forget), Calls()
    return entry[2]


def _module_in(fn: Any) -> Module | None:
    """Return the first module that a partial binds."""
    while isinstance(fn, functools.partial):
        for item in (*fn.args, *fn.keywords.values()):
            if isinstance(item, Module):
                return item
        fn = fn.func
    return None


def _owner_and_code(fn: Any) -> tuple[Any, Any]:
    """Return what a function belongs to, if it reaches no module, and what runs: both can be held weakly."""
    kind = type(fn)
    while kind is not FunctionType and isinstance(fn, functools.partial):
        fn = fn.func
        kind = type(fn)
    if kind is FunctionType:
        return fn.__code__, fn.__code__
    owner = fn
    code: Any = fn if isinstance(fn, type) else kind
    if kind is MethodType:
        owner, function = fn.__self__, fn.__func__
        code = function.__code__ if type(function) is FunctionType else type(function)
    elif kind is BuiltinFunctionType and not isinstance(fn.__self__, (type, ModuleType)):
        owner = code = type(fn.__self__)  # a method of an object in C, which is made anew each time
    return owner if type(owner).__weakrefoffset__ else type(owner), code

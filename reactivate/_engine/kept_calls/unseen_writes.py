"""Writes of a saved call that move no version: through `.data`, and through NumPy's view of a tensor.

A recomputation skips a saved call. Where the call wrote to what is computed in the region, it has to be recomputed, and
mostly a version counter tells. `.data` gives out a tensor on the same memory that counts for itself, and an array counts
nothing. So a call whose code names one of them runs under a function mode that sees them given out: of the one it looks at
the counter when the call returns, of the other at the bytes.

The code is found as the code of scripted functions is (see `namespaces`), and through closures, partials and modules. Mostly
none names any of this, and then there is no mode.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable, Iterator
from types import CellType, FunctionType, MethodType
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor
from torch.nn import Module
from torch.overrides import TorchFunctionMode

from reactivate._engine.inputs.namespaces import facts_of, methods_of
from reactivate._engine.inputs.unseen_writers import names_a_way
from reactivate._engine.state.memory import memory_of
from reactivate._torch.modes import copy_unseen, equal_unseen

_DATA: Any = Tensor.data
_GET_DATA = _DATA.__get__
_ARRAYS = frozenset({Tensor.numpy, Tensor.__array__, Tensor.__dlpack__})


class UnseenWrites(TorchFunctionMode):
    """Sees what a call gets to write to `tensors` with, past their version counters."""

    def __init__(self, tensors: Iterable[Tensor], apart_from: Iterable[Tensor]) -> None:
        super().__init__()
        left = set(map(memory_of, apart_from))
        self._memory = {key for key in map(memory_of, tensors) if key is not None and key not in left}
        self._given: list[tuple[Tensor, int]] = []  # with a counter of their own
        self._copies: list[tuple[Tensor, Tensor]] = []  # of what NumPy has

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _ARRAYS and memory_of(args[0]) in self._memory:
            self._copies.append((args[0].detach(), copy_unseen(args[0])))
        result = func(*args, **(kwargs or {}))
        if func == _GET_DATA and memory_of(result) in self._memory:
            self._given.append((result, result._version))
        return result

    def change(self) -> str | None:
        """Return what the call did, in words."""
        if any(tensor._version != version for tensor, version in self._given):
            return "it writes to its arguments or to what it closes over through `.data`"
        if not all(equal_unseen(tensor, copy) for tensor, copy in self._copies):
            return "it writes to its arguments or to what it closes over through NumPy"
        return None


def may_write_unseen(fn: Any) -> bool:
    """Return whether code that a call of `fn` may run names a way past version counters."""
    return _names_a_way(fn, set())


def _names_a_way(value: Any, seen: set[int]) -> bool:
    if id(value) in seen:
        return False
    seen.add(id(value))
    if isinstance(value, FunctionType):
        return names_a_way(facts_of(value)) or any(
            _names_a_way(item, seen) for item in _contents(value.__closure__ or ())
        )
    if isinstance(value, Module):
        if value not in _modules:
            kinds = {type(module) for module in value.modules()}
            _modules[value] = any(_names_a_way(method, seen) for kind in kinds for method in methods_of(kind))
        return _modules[value]
    if isinstance(value, MethodType):
        return _names_a_way(value.__func__, seen) or _names_a_way(value.__self__, seen)
    if isinstance(value, functools.partial):
        return any(_names_a_way(item, seen) for item in (value.func, *value.args))
    call = inspect.getattr_static(type(value), "__call__", None)
    return isinstance(call, FunctionType) and _names_a_way(call, seen)


_modules: WeakKeyDictionary[Module, bool] = WeakKeyDictionary()  # found once: a walk for each call would be quadratic


def _contents(cells: Iterable[CellType]) -> Iterator[Any]:
    for cell in cells:
        try:
            yield cell.cell_contents
        except ValueError:  # nothing yet
            continue

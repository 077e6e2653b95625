"""Modules as they are reached, in a tree that is too large to be walked for every region.

`checkpoint(self.step)` for each of N blocks reaches the whole model from each region: to note all of it would be quadratic
in time and memory. So where a tree is large, a module is noted when the forward reaches it: when it is taken from its
parent, or one of its parameters, buffers and children is asked for. Torch's functions for that are observed while such a
forward runs. They keep their identity, which compilers ask for, and get their own code back when the last one ends.

What reaches a module by none of these functions (`self._modules[...]`) is not seen.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from inspect import CO_GENERATOR
from types import CodeType, FunctionType
from typing import Any

from torch.compiler import is_compiling
from torch.nn import Module, ModuleDict, ModuleList, Sequential

Reach = Callable[[Module], None]


class _Observers(threading.local):
    def __init__(self) -> None:
        self.reaches: list[Reach] = []


_observers = _Observers()
_changing = threading.RLock()
_open_forwards = 0


def open_reaching(reach: Reach) -> None:
    """Call `reach` for each module that code on this thread reaches from now on, perhaps several times."""
    global _open_forwards
    with _changing:
        if not _open_forwards:
            for observed in _OBSERVED:
                observed.begin()
        _open_forwards += 1
    _observers.reaches.append(reach)


def close_reaching(reach: Reach) -> None:
    """End what `open_reaching` began."""
    global _open_forwards
    _observers.reaches.remove(reach)
    with _changing:
        _open_forwards -= 1
        if not _open_forwards:
            for observed in _OBSERVED:
                observed.end()


def _tell(module: Module) -> None:
    for reach in tuple(_observers.reaches):
        reach(module)


class _Observed:
    """One of torch's functions, with code that tells of modules for as long as a forward is observed.

    Args:
        function: a method of a module.
        tell: called with the module and what the function returns or is about to go through.
    """

    def __init__(self, function: Any, tell: Callable[[Any, Any], None]) -> None:
        self._function = function
        self._code, self._keywords = function.__code__, function.__kwdefaults__
        original = FunctionType(
            function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
        )
        original.__kwdefaults__ = function.__kwdefaults__

        def observed(self: Any, *args: Any, **kwargs: Any) -> Any:
            if is_compiling() or not _observers.reaches:
                return original(self, *args, **kwargs)
            _tell(self)
            result = original(self, *args, **kwargs)
            tell(self, result)
            return result

        self._observed = observed
        # Python 3.13 warns where a generator function is given code of another kind.
        kind = _going_through if function.__code__.co_flags & CO_GENERATOR else _observing
        self._telling: CodeType = kind.__code__

    def begin(self) -> None:
        """Let the function tell of modules."""
        self._function.__kwdefaults__ = {"_observed": self._observed}
        self._function.__code__ = self._telling

    def end(self) -> None:
        """Give the function its own code back."""
        self._function.__code__ = self._code
        self._function.__kwdefaults__ = self._keywords


def _observing(self: Any, *args: Any, _observed: Any = None, **kwargs: Any) -> Any:
    return _observed(self, *args, **kwargs)


def _going_through(self: Any, *args: Any, _observed: Any = None, **kwargs: Any) -> Any:
    yield from _observed(self, *args, **kwargs)


def _tell_of_result(module: Module, result: Any) -> None:
    if isinstance(result, Module):
        _tell(result)


def _tell_of_children(module: Module, result: Any) -> None:
    for child in module._modules.values():
        if child is not None:
            _tell(child)


def _tell_of_all(module: Module, result: Any) -> None:
    for inner in tree_of(module):
        _tell(inner)


def tree_of(module: Module) -> Iterable[Module]:
    """Return the module and all modules inside of it, past every function that is observed."""
    found: dict[int, Module] = {}
    todo: list[Module | None] = [module]
    while todo:
        inner = todo.pop()
        if inner is not None and id(inner) not in found:
            found[id(inner)] = inner
            todo += reversed(inner.__dict__["_modules"].values())
    return found.values()


_OBSERVED = [
    _Observed(Module.__getattr__, _tell_of_result),
    *(_Observed(kind.__getitem__, _tell_of_result) for kind in (ModuleList, Sequential, ModuleDict)),
    *(_Observed(kind.__iter__, _tell_of_children) for kind in (ModuleList, Sequential)),
    *(_Observed(way, _tell_of_children) for way in (ModuleDict.items, ModuleDict.values, Module.named_children)),
    _Observed(Module.named_modules, _tell_of_all),
]

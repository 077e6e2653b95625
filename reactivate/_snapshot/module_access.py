"""Modules as they are reached, in a tree that is too large to be walked for every region.

`checkpoint(self.step)` for each of N blocks reaches the whole model from each region: to note all of it would be quadratic
in time and memory. So where a tree is large, a module is noted when the forward reaches it: when it is taken from its
parent, or one of its parameters, buffers and children is asked for. Torch's functions for that are observed while such a
forward runs. They keep their identity, which compilers ask for, and get their own code back when the last one ends.

Compiled code reaches modules by none of these functions. So the function that torch calls when compiled code begins is
observed too. Code that is not compiled and reaches a module in another way (`self._modules[...]`) is seen when it calls it.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Sequence
from inspect import CO_GENERATOR
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import torch
from torch.compiler import is_compiling
from torch.nn import Module, ModuleDict, ModuleList, Sequential

from reactivate._torch.dynamo import begin_of_compiled_call, is_loaded
from reactivate._torch.private_api import is_missing


class Observer(NamedTuple):
    """Functions that are called, on any thread, while code is observed.

    Attributes:
        reach: for each module that is reached, perhaps several times.
        begin: when compiled code begins, with what torch has for it (see `callback_of`).
        known: {id: module} of those for which there is no need to call `reach`.
    """

    reach: Callable[[Module], None]
    begin: Callable[[Any], None]
    known: dict[int, Module]


_open: list[Observer] = []
_known: list[dict[int, Module]] = [{}]  # one item: the modules that observers know
_begun: list[_Observed] = []
_changing = threading.RLock()


def open_reaching(observer: Observer) -> None:
    """Observe code from now on."""
    with _changing:
        if not _open:
            _begin((*_OBSERVED, _CALLS, _compiled_calls()) if is_loaded() else (*_OBSERVED, _CALLS))
        _open.append(observer)
        _note_known()


def close_reaching(observer: Observer) -> None:
    """End what `open_reaching` began."""
    with _changing:
        _open.remove(observer)
        _note_known()
        while _begun and not _open:
            _begun.pop().end()


def _note_known() -> None:
    _known[0] = _open[0].known if len(_open) == 1 else {}


def _begin(functions: Sequence[_Observed]) -> None:
    _begun.extend(functions)
    for observed in functions:
        observed.begin()


def sees_all() -> bool:
    """Return whether compiled code begins in no way that is not observed."""
    return not (is_loaded() and is_missing(begin_of_compiled_call()))


def _tell(module: Module, *args: Any) -> None:
    for observer in tuple(_open):
        observer.reach(module)


def _nothing(*args: Any) -> None:
    """There is no more to tell."""


class _Given(NamedTuple):
    """Functions that the observing code is given, since its globals are torch's: under a name that is no module's argument.

    Attributes:
        first: told before; returns whether anyone is.
        original: the function that is observed.
        then: told what that has returned.
        known: see `_known`.
    """

    first: Callable[..., bool]
    original: Callable[..., Any]
    then: Callable[..., None]
    known: list[dict[int, Module]]


class _Observed:
    """One of torch's functions, with code that tells of modules for as long as a forward is observed.

    Args:
        function: a method of a module, or another function.
        tell: called with what the function returns or is about to go through, and its arguments.
        tell_first: called with its arguments before it runs.
        observing: whose code runs in the place of the function's.
    """

    def __init__(
        self,
        function: Any,
        tell: Callable[..., None] = _nothing,
        tell_first: Callable[..., None] = _tell,
        observing: Any = None,
    ) -> None:
        self.function = function
        self._code, self._keywords = function.__code__, function.__kwdefaults__
        original = FunctionType(
            function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
        )
        original.__kwdefaults__ = function.__kwdefaults__

        def first(*args: Any) -> bool:
            if is_compiling() or not _open:
                return False
            tell_first(*args)
            return True

        # With its own, which another thread may need in between.
        self._given = {**(self._keywords or {}), "_reactivate": _Given(first, original, tell, _known)}
        if observing is None:  # Python 3.13 warns where a generator function is given code of another kind
            observing = _going_through if function.__code__.co_flags & CO_GENERATOR else _observing
        self._telling: CodeType = observing.__code__

    def begin(self) -> None:
        """Let the function tell of modules."""
        self.function.__kwdefaults__ = self._given
        self.function.__code__ = self._telling

    def end(self) -> None:
        """Give the function its own code back."""
        self.function.__code__ = self._code
        self.function.__kwdefaults__ = self._keywords


# With one frame more, not two: a module may call itself until the stack is full.
def _observing(*args: Any, _reactivate: _Given, **kwargs: Any) -> Any:
    is_told = _reactivate.first(*args)
    result = _reactivate.original(*args, **kwargs)
    if is_told:
        _reactivate.then(result, *args)
    return result


def _going_through(*args: Any, _reactivate: _Given, **kwargs: Any) -> Any:
    is_told = _reactivate.first(*args)
    result = _reactivate.original(*args, **kwargs)
    if is_told:
        _reactivate.then(result, *args)
    yield from result


# A forward calls these two again and again, and hardly ever for a module that has not been told of.
def _asking(self: Any, name: Any, *, _reactivate: _Given) -> Any:
    known = _reactivate.known[0]
    is_told = id(self) in known or _reactivate.first(self)
    result = _reactivate.original(self, name)
    if is_told and id(result) not in known:
        _reactivate.then(result)
    return result


def _calling(self: Any, *args: Any, _reactivate: _Given, **kwargs: Any) -> Any:
    if id(self) not in _reactivate.known[0]:
        _reactivate.first(self)
    return _reactivate.original(self, *args, **kwargs)


def _tell_of_result(result: Any, *args: Any) -> None:
    if isinstance(result, Module) and not is_compiling():
        _tell(result)


def _tell_of_children(result: Any, module: Module, *args: Any) -> None:
    for child in module._modules.values():
        if child is not None:
            _tell(child)


def _tell_of_tree(module: Module, *args: Any) -> None:
    for inner in tree_of(module):
        _tell(inner)


def _tell_of_compiled_code(callback: Any) -> None:
    if callback is not None:
        _CALLS.end()  # whose code is compiled
        for observer in tuple(_open):
            observer.begin(callback)


def _observe_compiled_calls(*args: Any) -> None:
    with _changing:
        _begin((_compiled_calls(),))


@functools.cache
def _compiled_calls() -> _Observed:
    return _Observed(begin_of_compiled_call(), tell_first=_tell_of_compiled_code)


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
    _Observed(Module.__getattr__, _tell_of_result, observing=_asking),
    *(_Observed(kind.__getitem__, _tell_of_result) for kind in (ModuleList, Sequential, ModuleDict)),
    *(_Observed(kind.__iter__, _tell_of_children) for kind in (ModuleList, Sequential)),
    *(_Observed(way, _tell_of_children) for way in (ModuleDict.items, ModuleDict.values, Module.named_children)),
    *(
        _Observed(way, tell_first=_tell_of_tree)
        for way in (Module.named_modules, Module.state_dict, Module.load_state_dict)
    ),
    _Observed(torch.compile, tell_first=_observe_compiled_calls),  # perhaps the first time
]
_CALLS = _Observed(Module.__call__, observing=_calling)
OBSERVED_FUNCTIONS = frozenset(item.function for item in (*_OBSERVED, _CALLS))
"""Functions of torch's whose code is ours for a time: to put back what it was would be to observe a recomputation."""

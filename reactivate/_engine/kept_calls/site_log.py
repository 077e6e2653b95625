"""The log that calls inside of a region with a policy go to: of its forward pass, or of a recomputation."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from numbers import Number
from types import FunctionType
from typing import Any
from weakref import finalize, ref

from torch import Tensor
from torch.compiler import is_compiling
from torch.overrides import TorchFunctionMode

from reactivate._engine.kept_calls.choice import CallDecision, Choice
from reactivate._engine.kept_calls.saved_functions import intercept, release
from reactivate._engine.kept_calls.saved_modules import SavedStandIn
from reactivate._engine.mismatch.oplog import OpLog
from reactivate._engine.state.contents import ATOMS
from reactivate._torch.inductor import COMPILED_CODE, compiled_code_is_shown
from reactivate._torch.modes import (
    function_modes,
    is_function_mode_active,
    pop_function_mode,
    push_function_mode,
    replace_function_modes,
)

# The log that calls on this thread go to. A region without a policy inside of one with a policy is no affair of its.
_current: ContextVar[Log | None] = ContextVar("reactivate.sites", default=None)
open_logs: list[object] = []  # that are at work anywhere: mostly none, and then nobody need look further


def current_log() -> Log | None:
    """Return the log that notes or skips saved calls: None outside of regions with a policy, and inside of a saved call."""
    log = _current.get() if open_logs else None
    return None if log is None or log.is_inside else log


def is_at_work() -> bool:
    """Return whether calls on this thread go to a log."""
    return _current.get() is not None


@contextmanager
def set_aside() -> Iterator[None]:
    """No log is at work on this thread for the time of the context."""
    log = _current.get()
    if log is not None:
        log.finish_pending()
    token = _current.set(None)
    try:
        yield
    finally:
        _current.reset(token)


def serve(choice: Choice) -> Choice:
    """Let the custom functions that a policy names be saved calls, for as long as its `choice` lives.

    Not only while a region runs: what a class looks up in between, in a backward or on another thread, stays the same.
    """
    kinds = choice.interest.functions
    if kinds:
        intercept(kinds, current_log)
        finalize(choice, release, kinds)
    return choice


class Log:
    """The log of a forward pass or of a recomputation: both number calls."""

    def __init__(self, record: Any, choice: Choice) -> None:
        self._record = ref(record)  # which has the log, as have the contexts of regions inside of it
        self.choice = choice
        self.number = 0
        self.is_inside = False
        self.is_setup_inside = False  # whether what a custom function sets up next is part of a saved call
        ops = choice.interest.ops
        self._shows_compiled = ops is None or COMPILED_CODE in ops
        self._mode: _LoggingMode | None = _LoggingMode(self, choice) if choice.sees_functions else None

    @property
    def record(self) -> Any:
        """The region's record."""
        return self._record()

    def open(self) -> None:
        """From here on, calls on this thread go to this log."""
        self._stand_ins = [SavedStandIn.enter(module, current_log) for module in self.choice.find_modules()]
        open_logs.append(self)
        self._token = _current.set(self)
        if self._mode is not None:
            if self._shows_compiled:
                compiled_code_is_shown.begin()
            push_function_mode(self._mode)

    def close(self) -> None:
        """The end of what `open` began."""
        for stand_in in self._stand_ins:
            stand_in.leave()
        self._stand_ins.clear()
        if self._mode is not None:
            pop_function_mode()
            if self._shows_compiled:
                compiled_code_is_shown.end()
            self._mode = None  # which knows the log: a cycle would hold the region until the collector runs (Rule 2)
        _current.reset(self._token)
        open_logs.remove(self)
        self.is_inside = True  # nothing more is looked at, in contexts that were copied while it was open

    def call(self, decision: CallDecision, fn: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """`fn(*args, **kwargs)`, a call that the policy has a say in."""
        raise NotImplementedError

    def call_function(self, decision: CallDecision, forward: Callable[..., Any], args: Any, is_split: bool) -> Any:
        """`forward(*args)` of a custom function, a call that the policy has a say in.

        Args:
            decision: what the policy says of its class.
            forward: of the class.
            args: its arguments, and in front of them the context unless `is_split`.
            is_split: whether the class has a `setup_context`.
        """
        raise NotImplementedError

    def run_function(self, forward: Callable[..., Any], args: Any, is_split: bool) -> Any:
        """Run the `forward` of a custom function. Its `setup_context` comes right after it."""
        result = forward(*args)
        self.is_setup_inside = is_split and self.is_inside
        return result

    def set_up_function(self, setup: Callable[..., Any], context: Any, inputs: Any, output: Any) -> Any:
        """`setup(context, inputs, output)` of a custom function."""
        if not self.is_setup_inside:
            return setup(context, inputs, output)
        self.is_setup_inside = False
        return self.unlogged(self.run_again)(setup, (context, inputs, output), {})

    def finish_pending(self) -> None:
        """Nothing that is saved from here on belongs to the call that was the last one."""

    @property
    def values(self) -> OpLog | None:
        """Return the log of the ops of this pass, with `determinism="values"`."""
        raise NotImplementedError

    def unlogged(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, with its ops not written down: those of a saved call are not in both passes."""
        return function if self.values is None else self.values.unseen(function)

    def run_again(self, fn: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """A call that is not skipped, and nothing inside of it is looked at."""
        self.is_inside = True
        try:
            return fn(*args, **kwargs)
        finally:
            self.is_inside = False


class _LoggingMode(TorchFunctionMode):
    """Shows torch's functions to a log."""

    def __init__(self, log: Log, choice: Choice) -> None:
        self._log = log
        self._choice = choice
        self._decisions = choice.decisions
        self._ignored = choice.ignored

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_compiling():  # torch.compile traces this: its graph is that without the mode
            return func(*args, **(kwargs or {}))
        if func in self._ignored:
            return func(*args, **kwargs) if kwargs else func(*args)
        if self._log.is_inside or current_log() is not self._log:  # nor what a region inside of this one calls
            return func(*args, **kwargs) if kwargs else func(*args)
        decision = self._decisions.get(func)
        if decision is None:
            decision = self._choice.look_at(func)
        if decision.is_of_interest:
            return self._log.call(decision, func, args, kwargs or {})
        if decision.is_opened:
            with self:
                return opened(func)(*args, **(kwargs or {}))
        return func(*args, **kwargs) if kwargs else func(*args)


@functools.cache
def opened(function: FunctionType) -> FunctionType:
    """One of torch's functions that are written in Python, without its question whether a mode wants all of it.

    So that a mode sees the functions that it calls.
    """
    names = {**function.__globals__, "has_torch_function": lambda tensors: False}
    copied = FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied


def unseen(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function unseen by the modes around the region: what is looked at here are not the user's calls."""
    if not is_function_mode_active():
        return function(*args)
    modes = function_modes()
    replace_function_modes(())  # `without_function_modes` would make plain tensors of subclasses
    try:
        return function(*args)
    finally:
        replace_function_modes(modes)


def tensors_in(args: Any, kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors among the arguments of a call, also those in lists, tuples and dicts."""
    found: list[Tensor] = []
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += tensors_in(value, {})
        elif isinstance(value, dict):
            found += tensors_in(value.values(), {})
        elif hasattr(value, "__dataclass_fields__") and hasattr(value, "__dict__"):
            found += tensors_in(vars(value).values(), {})
    return found


def objects_in(args: Any, kwargs: dict[str, Any]) -> list[Any]:
    """The lists, dicts and other objects among the arguments of a call: one that it returns is that of its caller."""
    found: list[Any] = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor) or type(value) in ATOMS:
            continue
        found.append(value)
        if isinstance(value, (list, tuple)):
            found += objects_in(value, {})
        elif isinstance(value, dict):
            found += objects_in(value.values(), {})
    return found


def scalars_in(args: Any, kwargs: dict[str, Any]) -> list[Any]:
    """The numbers and texts among the arguments of a call, in their order, as text: one that is not a number is itself."""
    values = (*args, *kwargs.values()) if kwargs else args
    return [repr(value) for value in values if isinstance(value, (Number, str))]

"""The log that calls inside of a region with a policy go to, and all the ways by which it sees them.

It sees torch's functions by a function mode, calls of modules by something in the place of their `forward`, custom autograd
functions by their class (see `functions`), and named functions because `reactivate.site` asks for it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any
from weakref import finalize, ref

from torch import Tensor
from torch.compiler import is_compiling
from torch.nn import Module
from torch.overrides import TorchFunctionMode

from reactivate._modules.standin import NAME, Placed, changing
from reactivate._passes.logs import current_log, log_of_calls
from reactivate._passes.oplog import OpLog
from reactivate._saved_calls.choice import CallDecision, Choice
from reactivate._saved_calls.functions import intercept, release
from reactivate._snapshot.held import ATOMS
from reactivate._torch.asking import IN_C, asking, show_inside
from reactivate._torch.dynamo import COMPILED_CODE, compiled_code_is_shown
from reactivate._torch.modes import function_modes, pop_function_mode, push_function_mode, replace_function_modes

SeenModule = tuple[Module, str, "CallDecision | None"]


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
    """The log of a forward pass or of a recomputation: both number the calls that the policy has a say in.

    Attributes:
        path: of the module in which calls are made now.
        ops: the log of the ops of this pass, with `check="every"`.
        modules: those whose calls it sees, with their paths and the decisions on them.
    """

    def __init__(self, region: Any, choice: Choice, ops: OpLog | None, modules: Sequence[SeenModule]) -> None:
        self._region = ref(region)  # which has the log, as have the contexts of regions inside of it
        self.choice = choice
        self.number = 0
        self.path = choice.path
        self.is_inside = False
        self.is_setup_inside = False  # whether what a custom function sets up next is part of a saved call
        self.ops, self.modules = ops, modules
        self._seen = {id(module): (path, decision) for module, path, decision in self.modules}
        interest = choice.interest.ops
        self._shows_compiled = interest is None or COMPILED_CODE in interest
        self._is_showing = False
        self._stand_ins: list[SeenForward] = []
        self._mode: _LoggingMode | None = _LoggingMode(self, choice) if choice.sees_functions else None

    @property
    def region(self) -> Any:
        """Return the region."""
        return self._region()

    def open(self) -> None:
        """From here on, calls on this thread go to this log."""
        for module, *_ in self.modules:
            SeenForward.enter(module, self._stand_ins)
        log_of_calls.set(self)  # there is none: `run` sets that of a region around this one aside
        if self._mode is not None:
            if self._shows_compiled:
                self._is_showing = True
                compiled_code_is_shown.begin()
            push_function_mode(self._mode)

    def close(self) -> None:
        """End what `open` began, as far as it came, and what an interrupted `close` has not ended."""
        if log_of_calls.get() is self:
            log_of_calls.set(None)
        while self._stand_ins:
            self._stand_ins[-1].leave(self._stand_ins)
        if self._mode is not None:
            modes = function_modes()
            if modes and modes[-1] is self._mode:
                pop_function_mode()
            elif any(mode is self._mode for mode in modes):  # one that the function has entered is still there
                replace_function_modes(tuple(mode for mode in modes if mode is not self._mode))
            self._mode = None  # which knows the log: a cycle would hold the region until the collector runs (Rule 2)
        if self._is_showing:
            self._is_showing = False
            compiled_code_is_shown.end()
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

    def call_module(self, module: int, forward: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """`forward(*args, **kwargs)` of a module, given by its id."""
        path, decision = self._seen.get(module, (self.path, None))
        if decision is not None:
            return self.call(decision, forward, args, kwargs)
        around, self.path = self.path, path
        try:
            return forward(*args, **kwargs)
        finally:
            self.path = around

    def finish_pending(self) -> None:
        """Nothing that is saved from here on belongs to the call that was the last one."""

    def unlogged(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, with its ops not written down: those of a saved call are not in both passes."""
        return function if self.ops is None else self.ops.unseen(function)

    def run_again(self, fn: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Make a call that is not skipped. Nothing inside of it is looked at."""
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
        if type(func) not in IN_C:
            func = asking(func, kwargs)
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
            return show_inside(self, func, args, kwargs or {})
        return func(*args, **kwargs) if kwargs else func(*args)


_kept: dict[int, SeenForward] = {}
"""By the id of its module: what torch.compile has traced holds as long as the same object stands there."""


class SeenForward(Placed):
    """Takes calls of a module to the log at work on the thread that calls it, while any log needs it.

    `apply` puts something in the place of a `forward` for as long as a policy is applied. This is for the other modules.
    Each has one, which holds nothing of the module while it does not stand there.
    """

    __slots__ = ("_forward", "_key", "_module", "_users")

    def __init__(self, module: Module) -> None:
        self._key, self._users = id(module), 0
        self._module = ref(module, functools.partial(_kept.pop, self._key))
        self._stand_in_for(module)

    def _stand_in_for(self, module: Module) -> None:
        super().__init__(module)
        self._forward: Any = module.forward

    def forget(self) -> None:
        self._attributes, self.hidden, self._forward = {}, None, None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward = self._forward
        if forward is None:  # it has gone since another thread found it here
            forward = self._module().forward  # type: ignore[union-attr]
        log = None if is_compiling() else current_log()
        return forward(*args, **kwargs) if log is None else log.call_module(self._key, forward, args, kwargs)

    def leave(self, entered: list[SeenForward]) -> None:
        """One log less needs it: it is the last one of those that the log has `entered`, until that is done."""
        with changing:
            if self._users == 1:
                self.give_way()
            self._users -= 1
            entered.pop()

    @classmethod
    def enter(cls, module: Module, entered: list[SeenForward]) -> None:
        """Stand in for `module`, once for all logs that need it; it is added to those that a log has `entered`."""
        with changing:
            placed = module.__dict__.get(NAME)
            if not isinstance(placed, cls):
                placed = module.__dict__[NAME] = cls._found_or_made(module)
            placed._users += 1
            entered.append(placed)

    @classmethod
    def _found_or_made(cls, module: Module) -> SeenForward:
        kept = _kept.get(id(module))
        if kept is None:
            kept = _kept[id(module)] = cls(module)
        elif kept._forward is None:
            kept._stand_in_for(module)
        else:  # it stands there, below something else
            return cls(module)
        return kept


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

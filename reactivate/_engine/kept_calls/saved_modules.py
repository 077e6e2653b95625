"""Saved calls of the modules inside of a module that `checkpoint` was given.

`apply` puts something in the place of a module's `forward` for as long as the policy is applied. Here nothing is
applied: the saved modules are stood in for while a forward pass or a recomputation of the region runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.compiler import is_compiling
from torch.nn import Module

from reactivate._modules.standin import NAME, Placed, changing


class SavedStandIn(Placed):
    """Takes calls of a module to the log at work on the thread that calls it; the module's own `forward` otherwise."""

    __slots__ = ("_current_log", "_forward", "_key", "_users")

    def __init__(self, module: Module, current_log: Callable[[], Any]) -> None:
        super().__init__(module)
        self._current_log = current_log
        self._forward = module.forward
        self._key = id(module)
        self._users = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        log = None if is_compiling() else self._current_log()
        decision = None if log is None else log.choice.modules_inside.get(self._key)
        if decision is None:
            return self._forward(*args, **kwargs)
        return log.call(decision, self._forward, args, kwargs)  # type: ignore[union-attr]

    def leave(self) -> None:
        """One log less needs it."""
        with changing:
            self._users -= 1
            if not self._users:
                self.give_way()

    @classmethod
    def enter(cls, module: Module, current_log: Callable[[], Any]) -> SavedStandIn:
        """Stand in for `module`, once for all logs that need it."""
        with changing:
            placed = module.__dict__.get(NAME)
            if not isinstance(placed, cls):
                placed = module.__dict__[NAME] = cls(module, current_log)
            placed._users += 1
        return placed

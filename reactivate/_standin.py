"""Something else in the place of a module's `forward`, for the time of one call.

A module's hooks run around `self.forward`, so what is to run inside of them has to stand under that name. It is there
while the hooks before it run, for all threads that call the module then, and is no state of the module's.
"""

from __future__ import annotations

from _thread import RLock, get_ident
from collections.abc import Callable
from typing import Any

from torch.nn import Module

NAME = "forward"
_changing = RLock()


class StandIn:
    """Calls for each thread what that thread has asked for, once; the module's own `forward` otherwise."""

    __slots__ = ("_attributes", "_calls", "_forward", "hidden")

    def __init__(self, module: Module) -> None:
        self._attributes = module.__dict__
        self._forward = module.forward
        self._calls: dict[int, Callable[..., Any]] = {}  # by thread
        self.hidden = self._attributes.get(NAME)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = self.leave()
        return self._forward(*args, **kwargs) if call is None else call(self._forward, args, kwargs)

    def leave(self) -> Callable[..., Any] | None:
        """Forget what this thread has asked for, and return it. The last one to leave clears the place."""
        with _changing:
            call = self._calls.pop(get_ident(), None)
            if not self._calls and self._attributes.get(NAME) is self:
                if self.hidden is None:
                    del self._attributes[NAME]
                else:
                    self._attributes[NAME] = self.hidden
        return call

    @classmethod
    def enter(cls, module: Module, call: Callable[..., Any]) -> StandIn:
        """Let the next call of `module.forward` on this thread be `call(forward, args, kwargs)`."""
        with _changing:
            stand_in = module.__dict__.get(NAME)
            if not isinstance(stand_in, cls):
                stand_in = module.__dict__[NAME] = cls(module)
            stand_in._calls[get_ident()] = call
        return stand_in


def copies_of(namespaces: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Copies of modules' `__dict__`s, as if nothing stood in."""
    copies = list(map(dict.copy, namespaces))
    for copy in copies:
        if NAME in copy and isinstance(copy[NAME], StandIn):
            hidden = copy.pop(NAME).hidden
            if hidden is not None:
                copy[NAME] = hidden
    return copies

"""Something else in the place of a module's `forward`, for the time of one call or for good.

A module's hooks run around `self.forward`, so what is to run inside of them has to stand under that name. For one call it is
there while the hooks before it run, for all threads that call the module then, and is no state of the module's.
"""

from __future__ import annotations

from _thread import RLock, get_ident
from collections.abc import Callable
from types import MethodType
from typing import Any

from torch.nn import Module

NAME = "forward"
changing = RLock()


class Cover:
    """Something of ours in the place of a module's `forward` for good. It leads to nothing but the module and what it hides.

    Attributes:
        hidden: the `forward` that stood among the module's attributes before; None if its class has it.
    """

    hidden: Any = None

    @property
    def hides_users(self) -> bool:
        """Return whether what it hides, or what is hidden by that in turn, is a `forward` of another library."""
        below = cover_in(self.hidden)
        return self.hidden is not None if below is None else below.hides_users


def cover_in(item: Any) -> Cover | None:
    """Return the cover that stands in a place, by itself or as what a method is bound to; None if something else does."""
    found = item.__self__ if type(item) is MethodType else item
    return found if isinstance(found, Cover) else None


def own_forward_of(module: Module) -> Any:
    """Return the `forward` among the attributes of a module, of the user's or of a library; None if its class has it."""
    found = vars(module).get(NAME)
    while (ours := found if isinstance(found, Placed) else cover_in(found)) is not None:
        found = ours.hidden
    return found


class Placed:
    """Something in the place of a module's `forward`, over what stood there before."""

    __slots__ = ("_attributes", "hidden", "is_done")

    def __init__(self, module: Module) -> None:
        self._attributes = module.__dict__
        self.hidden = self._attributes.get(NAME)
        self.is_done = False

    def give_way(self) -> None:
        """Clear the place, or see to it that whatever stands above does when it goes."""
        self.is_done = True
        attributes = self._attributes
        while isinstance(placed := attributes.get(NAME), Placed) and placed.is_done:
            if placed.hidden is None:
                del attributes[NAME]
            else:
                attributes[NAME] = placed.hidden
            placed.forget()

    def forget(self) -> None:
        """Do what there is to do when it stands there no more."""


class StandIn(Placed):
    """Calls for each thread what that thread has asked for, once; the module's own `forward` otherwise."""

    __slots__ = ("_calls", "_forward")

    def __init__(self, module: Module) -> None:
        super().__init__(module)
        self._forward = module.forward
        self._calls: dict[int, Callable[..., Any]] = {}  # by thread

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = self.leave()
        return self._forward(*args, **kwargs) if call is None else call(self._forward, args, kwargs)

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The module's own `forward`, for who looks at what is called."""
        return self._forward

    def leave(self) -> Callable[..., Any] | None:
        """Forget what this thread has asked for, and return it. The last one to leave clears the place."""
        with changing:
            call = self._calls.pop(get_ident(), None)
            if not self._calls:
                self.give_way()
        return call

    @classmethod
    def leave_any(cls, module: Module) -> None:
        """Forget what this thread has asked for of `module`, if `enter` came that far and no call has taken it."""
        placed = module.__dict__.get(NAME)
        while isinstance(placed, Placed) and not isinstance(placed, cls):
            placed = placed.hidden
        if isinstance(placed, cls):
            placed.leave()

    @classmethod
    def enter(cls, module: Module, call: Callable[..., Any]) -> None:
        """Let the next call of `module.forward` on this thread be `call(forward, args, kwargs)`."""
        with changing:
            stand_in = module.__dict__.get(NAME)
            if not isinstance(stand_in, cls):
                stand_in = module.__dict__[NAME] = cls(module)
            stand_in._calls[get_ident()] = call

"""The vocabulary: what a guard is, and what it sees of a call. No logic."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch.nn import Module

__all__ = ["Call", "Guard"]


class Call(Protocol):
    """What a guard may look at: the state that one call of a checkpointed function can reach."""

    @property
    def modules(self) -> Sequence[Module]:
        """Every module that the function can reach, each once."""

    @property
    def generators(self) -> Sequence[Any]:
        """Every source of randomness among the arguments and closures: `torch.Generator`, `random.Random`, NumPy's."""


class Guard:
    """State that a replay must see as the forward pass saw it, and must not advance a second time.

    Subclass it, and give an instance to `checkpoint(fn, guards=guards.DEFAULT.adding(MyGuard()))`. The engine calls
    `before`, runs the forward pass, and calls `after` with what `before` returned. What `after` returns is kept until
    the region's backward is done and is given to `replay` for each replay; None keeps nothing and leaves the replays
    alone.

    Example:
        >>> import contextlib, reactivate
        >>> class Counter(reactivate.guards.Guard):
        ...     name = "counter"
        ...     value = 0
        ...     def before(self, call):
        ...         return self.value
        ...     def after(self, token):
        ...         return token if token != self.value else None
        ...     @contextlib.contextmanager
        ...     def replay(self, snapshot):
        ...         now, self.value = self.value, snapshot
        ...         yield
        ...         self.value = now
    """

    name: str = "guard"
    """What `guards.DEFAULT.without(name)` calls it. Several guards may share a name."""

    replaces_tensors: bool = False
    """Whether the function may meet other tensors in a replay than in the forward pass, with versions of their own."""

    def before(self, call: Call) -> Any:
        """Read the state as the forward pass is about to see it. None: there is none, and no more questions."""
        return None

    def after(self, token: Any) -> Any | None:
        """What a replay needs to see that state again, or None. May be called twice for one `before`."""
        return token

    def replay(self, snapshot: Any) -> AbstractContextManager[Any] | None:
        """A context with the state as it was; afterwards the state is as if the replay had not happened.

        None where nothing has changed and nothing will: that saves entering a context.
        """
        raise NotImplementedError

    def leave(self, token: Any, error: BaseException | None) -> None:
        """The forward pass is over, by `error` if that is not None. For guards that opened something in `before`."""

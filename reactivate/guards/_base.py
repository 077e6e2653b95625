"""A guard set, and the context that guards restore state with."""

from __future__ import annotations

from _thread import allocate_lock, get_ident
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from threading import Condition
from types import TracebackType
from typing import Any

from reactivate._types import Guard
from reactivate.errors import UsageError


@dataclass(frozen=True)
class Guards:
    """Guards in the order in which they enter a replay.

    Args:
        members: the guards.

    Example:
        >>> import reactivate
        >>> fast = reactivate.guards.DEFAULT.without("rng")  # for a function that draws no random number
        >>> len(fast) < len(reactivate.guards.DEFAULT)
        True
    """

    members: tuple[Guard, ...] = ()

    def __iter__(self) -> Iterator[Guard]:
        return iter(self.members)

    def __len__(self) -> int:
        return len(self.members)

    def names(self) -> tuple[str, ...]:
        """The names that `without` knows."""
        return tuple(dict.fromkeys(guard.name for guard in self.members))

    def without(self, *names: str) -> Guards:
        """These guards but those with one of `names`.

        Raises:
            UsageError: no guard has that name.
        """
        for name in names:
            if name not in self.names():
                raise UsageError(f"No guard is called {name!r}. There are: {', '.join(self.names())}.")
        return Guards(tuple(guard for guard in self.members if guard.name not in names))

    def adding(self, *guards: Guard) -> Guards:
        """These guards, and `guards` inside of them."""
        return Guards((*self.members, *guards))


class Rewound:
    """State set back to a snapshot for as long as the context lasts."""

    __slots__ = ("_now", "_read", "_snapshot", "_write")

    def __init__(self, read: Callable[[], Any], write: Callable[[Any], None], snapshot: Any) -> None:
        self._read = read
        self._write = write
        self._snapshot = snapshot

    def __enter__(self) -> None:
        self._now = self._read()
        self._write(self._snapshot)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._write(self._now)


class _Everybodys:
    """State that all threads share: many recomputations may find it as it was, one may set it back.

    Recomputations that write nothing run side by side. One that sets state back runs alone: it waits until those that
    other threads are in have ended, unless it is itself inside of one, since two such would wait for each other.
    """

    def __init__(self) -> None:
        self._mutex = allocate_lock()
        self._changed = Condition(self._mutex)  # type: ignore[arg-type]
        self._owner: int | None = None
        self._depth = 0  # of the contexts that the owner has entered
        self._others: dict[int, int] = {}  # how many contexts each thread is in that write nothing
        self._waiting = 0

    def enter(self, differs: Callable[[], bool]) -> bool:
        """Return whether the calling thread owns the state from now on, as it has to be set back."""
        me = get_ident()
        with self._mutex:
            while True:
                if self._owner == me:
                    self._depth += 1
                    return True
                if self._owner is None:  # otherwise it cannot be told, as the state is not as it will be
                    if not differs():
                        self._others[me] = self._others.get(me, 0) + 1
                        return False
                    if not self._others or me in self._others:
                        self._owner, self._depth = me, 1
                        return True
                self._waiting += 1
                try:
                    self._changed.wait()
                finally:
                    self._waiting -= 1

    def leave(self, is_owner: bool) -> None:
        """End what `enter` began."""
        me = get_ident()
        with self._mutex:
            if is_owner:
                self._depth -= 1
                if not self._depth:
                    self._owner = None
            else:
                self._others[me] -= 1
                if not self._others[me]:
                    del self._others[me]
            if self._waiting:
                self._changed.notify_all()


_everybodys = _Everybodys()


def _always() -> bool:
    return True


@contextmanager
def undisturbed(rewound: AbstractContextManager[Any], differs: Callable[[], bool] = _always) -> Iterator[None]:
    """Set back state that all threads share, for one recomputation at a time (Rule 14).

    There is one lock for all of it: two recomputations that nest cannot take two locks in another order each.

    Args:
        rewound: the context in which the state is as it was.
        differs: () -> whether that writes anything, asked while no other thread has the state set back.
    """
    is_owner = _everybodys.enter(differs)
    try:
        with rewound:
            yield
    finally:
        _everybodys.leave(is_owner)

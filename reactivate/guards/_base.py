"""A guard set, and the context that guards restore state with."""

from __future__ import annotations

from _thread import allocate_lock, get_ident
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from contextvars import ContextVar
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


_Entry = tuple[int, object]  # the thread, and an object of this entry's own

_innermost: ContextVar[object] = ContextVar("reactivate.innermost_undisturbed", default=None)
"""The entry that the code is inside of. A region that begins there has it in its context, on whatever thread it is
recomputed: torch may run a backward that a recomputation waits for on another thread."""


class _Everybodys:
    """State that all threads share: many recomputations may find it as it was, one may set it back.

    Recomputations that write nothing run side by side. One that sets state back runs alone: it waits until those that
    other threads are in have ended, unless it is itself inside of one, since two such would wait for each other.
    """

    def __init__(self) -> None:
        self._mutex = allocate_lock()
        self._changed = Condition(self._mutex)  # type: ignore[arg-type]
        self._owner: _Entry | None = None
        self._depth = 0  # of the contexts inside of each other that the owner has entered
        self._others: list[_Entry] = []  # of the contexts that write nothing
        self._waiting = 0

    def enter(self, differs: Callable[[], bool]) -> _Entry:
        """Wait until the state is as it should be, or may be set back; `leave` takes what is returned."""
        me, around = get_ident(), _innermost.get()
        with self._mutex:
            while True:
                if self._owner is not None:  # whether anything differs cannot be told while it is set back
                    if _is_around(self._owner, me, around):
                        self._depth += 1
                        _innermost.set(self._owner[1])
                        return self._owner
                elif not differs():
                    self._others.append((me, object()))
                    _innermost.set(self._others[-1][1])
                    return self._others[-1]
                elif not self._others or any(_is_around(entry, me, around) for entry in self._others):
                    self._owner, self._depth = (me, object()), 1
                    _innermost.set(self._owner[1])
                    return self._owner
                self._waiting += 1
                try:
                    self._changed.wait()
                finally:
                    self._waiting -= 1

    def leave(self, entry: _Entry) -> None:
        """End what `enter` began."""
        with self._mutex:
            if entry is self._owner:
                self._depth -= 1
                if not self._depth:
                    self._owner = None
            else:
                self._others.remove(entry)
            if self._waiting:
                self._changed.notify_all()


def _is_around(entry: _Entry, thread: int, innermost: object) -> bool:
    return entry[0] == thread or entry[1] is innermost


_everybodys = _Everybodys()


def _always() -> bool:
    return True


class undisturbed:  # noqa: N801 - read as a function
    """Set back state that all threads share, for one recomputation at a time (Rule 14).

    There is one lock for all of it: two recomputations that nest cannot take two locks in another order each.

    Args:
        rewound: the context in which the state is as it was.
        differs: () -> whether that writes anything, asked while no other thread has the state set back.
    """

    __slots__ = ("_differs", "_entry", "_rewound")

    def __init__(self, rewound: AbstractContextManager[Any], differs: Callable[[], bool] = _always) -> None:
        self._rewound = rewound
        self._differs = differs

    def __enter__(self) -> None:
        self._entry = _everybodys.enter(self._differs)
        try:
            self._rewound.__enter__()
        except BaseException:
            _everybodys.leave(self._entry)
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self._rewound.__exit__(kind, error, traceback)
        finally:
            _everybodys.leave(self._entry)

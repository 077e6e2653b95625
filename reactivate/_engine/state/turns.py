"""State that all threads share: set back by one recomputation at a time (Rule 14).

There is one lock for all of it: two recomputations that nest cannot take two locks in another order each.
"""

from __future__ import annotations

from _thread import allocate_lock, get_ident
from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from threading import Condition
from types import TracebackType
from typing import Any

Entry = tuple[int, object]  # the thread, and an object of this entry's own

_innermost: ContextVar[object] = ContextVar("reactivate.innermost_undisturbed", default=None)
"""The entry that the code is inside of. A region that begins there has it in its context, on whatever thread it is
recomputed: torch may run a backward that a recomputation waits for on another thread."""


class Everybodys:
    """State that all threads share: many recomputations may find it as it was, one may set it back.

    Recomputations that write nothing run side by side. One that sets state back runs alone: it waits until those that
    other threads are in have ended, or wait themselves.
    """

    def __init__(self) -> None:
        self._mutex = allocate_lock()
        self._changed = Condition(self._mutex)
        self._owner: Entry | None = None
        self._depth = 0  # of the contexts inside of each other that the owner has entered
        self._others: list[Entry] = []  # of the contexts that write nothing
        self._waiting: list[int] = []  # threads

    def enter(self, differs: Callable[[], bool]) -> Entry:
        """Wait until the state is as it should be, or may be set back; `leave` takes what is returned.

        Args:
            differs: () -> whether anything is to be set back. The last thing that is asked before this returns: what it has
                looked at holds for what comes next.
        """
        me, around = get_ident(), _innermost.get()
        with self._mutex:
            entry = self._entered(differs, me, around)
            if entry is None:
                self._waiting.append(me)
                self._changed.notify_all()  # one that waits for this thread need not any more
                try:
                    while entry is None:
                        self._changed.wait()
                        entry = self._entered(differs, me, around)
                finally:
                    self._waiting.remove(me)
            _innermost.set(entry[1])
            return entry

    def _entered(self, differs: Callable[[], bool], me: int, around: object) -> Entry | None:
        """Return what a thread enters, None if it has to wait."""
        if self._owner is None:
            if not differs():
                self._others.append((me, object()))
                return self._others[-1]
            if all(_is_around(entry, me, around) or entry[0] in self._waiting for entry in self._others):
                self._owner, self._depth = (me, object()), 1
                return self._owner
        elif _is_around(self._owner, me, around):
            differs()  # from what the owner has set back
            self._depth += 1
            return self._owner
        return None  # whether anything differs cannot be told while another thread has it set back

    def leave(self, entry: Entry) -> None:
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


def _is_around(entry: Entry, thread: int, innermost: object) -> bool:
    return entry[0] == thread or entry[1] is innermost


everybodys = Everybodys()


def _always() -> bool:
    return True


class undisturbed:  # noqa: N801 - read as a function
    """Set back state that all threads share, for one recomputation at a time (Rule 14).

    There is one lock for all of it: two recomputations that nest cannot take two locks in another order each.

    Args:
        rewound: the context in which the state is as it was.
        differs: () -> whether that writes anything, asked while no other thread has the state set back, right before.
    """

    __slots__ = ("_differs", "_entry", "_rewound")

    def __init__(self, rewound: AbstractContextManager[Any], differs: Callable[[], bool] = _always) -> None:
        self._rewound = rewound
        self._differs = differs

    def __enter__(self) -> None:
        self._entry = everybodys.enter(self._differs)
        try:
            self._rewound.__enter__()
        except BaseException:
            everybodys.leave(self._entry)
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self._rewound.__exit__(kind, error, traceback)
        finally:
            everybodys.leave(self._entry)

"""State that all threads share: set back by one recomputation at a time (Rule 14).

There is one lock for all of it: two recomputations that nest cannot take two locks in another order each.
"""

from __future__ import annotations

from _thread import allocate_lock, get_ident
from collections.abc import Callable
from contextlib import AbstractContextManager
from threading import Condition
from typing import Any


class Everybodys:
    """State that all threads share: many recomputations may find it as it was, one may set it back.

    Recomputations that write nothing run side by side. One that sets state back runs alone: it waits until those that
    other threads are in have ended, unless it is itself inside of one, since two such would wait for each other.
    """

    def __init__(self) -> None:
        self._mutex = allocate_lock()
        self._changed = Condition(self._mutex)
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


everybodys = Everybodys()


def _always() -> bool:
    return True


class undisturbed:  # noqa: N801 - a context manager, named as one
    """A context in which state that all threads share is set back, for one thread at a time.

    Args:
        rewound: the context in which the state is as it was.
        differs: () -> whether that writes anything, asked while no other thread has the state set back.
    """

    __slots__ = ("_differs", "_is_owner", "_rewound")

    def __init__(self, rewound: AbstractContextManager[Any], differs: Callable[[], bool] = _always) -> None:
        self._rewound = rewound
        self._differs = differs

    def __enter__(self) -> None:
        self._is_owner = everybodys.enter(self._differs)
        try:
            self._rewound.__enter__()
        except BaseException:
            everybodys.leave(self._is_owner)
            raise

    def __exit__(self, *error: Any) -> None:
        try:
            self._rewound.__exit__(*error)
        finally:
            everybodys.leave(self._is_owner)

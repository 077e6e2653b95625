"""State that all threads share, set back for one recomputation at a time (Rule 14).

There is one lock for all of it: two recomputations that nest cannot take two locks in another order each.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from threading import RLock
from typing import Any

turn = RLock()


class undisturbed:  # noqa: N801 - a context manager, named as one
    """A context that is entered by one thread at a time."""

    __slots__ = ("_rewound",)

    def __init__(self, rewound: AbstractContextManager[Any]) -> None:
        self._rewound = rewound

    def __enter__(self) -> None:
        turn.acquire()
        try:
            self._rewound.__enter__()
        except BaseException:
            turn.release()
            raise

    def __exit__(self, *error: Any) -> None:
        try:
            self._rewound.__exit__(*error)
        finally:
            turn.release()

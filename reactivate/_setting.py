"""Context variables and other state that are set for the time of a context."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")


@contextmanager
def set_to(variable: ContextVar[T], value: T) -> Iterator[None]:
    """Let a context variable have a value inside of the context."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


@dataclass(slots=True, eq=False)
class Rewound:
    """State set back to a snapshot for as long as the context lasts. `differs` asks `is_same(present, snapshot)`."""

    read: Callable[[], Any]
    write: Callable[[Any], Any]
    snapshot: Any
    is_same: Callable[[Any, Any], bool] = operator.eq
    now: Any = None

    def differs(self) -> bool:
        """Return whether the present state is another one."""
        return not self.is_same(self.read(), self.snapshot)

    def __enter__(self) -> None:
        self.now = self.read()
        self.write(self.snapshot)

    def __exit__(self, *error: object) -> None:
        self.write(self.now)

"""Context variables that have a value for the time of a context."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

T = TypeVar("T")


@contextmanager
def set_to(variable: ContextVar[T], value: T) -> Iterator[None]:
    """Let a context variable have a value inside of the context."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)

"""Context variables and grad mode around a saved call: where the call sets them, a recomputation that skips it does too."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextvars import ContextVar, copy_context
from typing import Any

from torch import is_grad_enabled


class Surroundings:
    """Context variables and grad mode when a call begins."""

    __slots__ = ("_context", "_has_grad")

    def __init__(self) -> None:
        self._context = copy_context()
        self._has_grad = is_grad_enabled()

    def changes(self) -> tuple[str | None, list[Callable[[], None]]]:
        """Return why the call has to be recomputed, or what repeats its changes."""
        if is_grad_enabled() is not self._has_grad:
            return "it turns gradients on or off", []
        before = self._context
        changed = [(var, value) for var, value in copy_context().items() if before.get(var, before) is not value]
        return None, [functools.partial(_set, changed)] if changed else []


def _set(variables: list[tuple[ContextVar[Any], Any]]) -> None:
    for variable, value in variables:
        variable.set(value)

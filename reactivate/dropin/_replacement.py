"""The handle of an installed drop-in: functions of another library in whose place functions of this package are."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from types import ModuleType, TracebackType

from reactivate.dropin._references import Swap, backwards, replace_everywhere
from reactivate.errors import UsageError


class Replacement:
    """Functions that stand in the place of another library's, wherever these are bound, until `remove`.

    It is a context manager, whose end takes it back.

    Args:
        library: the other library's name.
        swaps: its functions, and what takes their place.

    Raises:
        UsageError: references cannot be found.
    """

    def __init__(self, library: str, swaps: Sequence[Swap]) -> None:
        self.library = library
        self._is_active = True
        self._swaps = replace_everywhere(swaps)

    def __repr__(self) -> str:
        return f"<reactivate in the place of {self.library}, {'installed' if self._is_active else 'taken back'}>"

    def remove(self) -> None:
        """Put the library's functions back, also where they were imported in the meantime.

        Raises:
            UsageError: this was done before.
        """
        if not self._is_active:
            raise UsageError("This installation was taken back already.")
        self._is_active = False
        replace_everywhere(backwards(self._swaps))

    def __enter__(self) -> Replacement:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.remove()


def second_instance(module: ModuleType) -> ModuleType:
    """Return the module once more: functions of its own, so that a reference to one of them stems from an installation."""
    spec = module.__spec__
    assert spec is not None
    assert spec.loader is not None
    instance = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(instance)
    return instance

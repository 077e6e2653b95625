"""Installations: functions of a drop-in in the place of a library's, wherever something refers to these."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from types import ModuleType, TracebackType
from typing import Any

from reactivate.dropin._references import Swap, backwards, replace_everywhere
from reactivate.errors import UsageError

_active: list[Installation] = []


class Installation:
    """The handle of `install`: a context manager, whose end takes it back, as `remove()` does.

    Args:
        upstream: the library's module.
        dropin: the module of the drop-in.
        names: {name in the library's module: name in the drop-in}; those that the library does not have are left out.
        settings: attributes of the drop-in, for this installation.
    """

    def __init__(self, upstream: ModuleType, dropin: ModuleType, names: Mapping[str, str], **settings: Any) -> None:
        self._upstream = upstream.__name__
        if any(one._upstream == self._upstream for one in _active):
            raise UsageError(
                f"The drop-in for {self._upstream} is installed already. Call `remove()` on what `install()` returned."
            )
        instance = _second_instance(dropin)
        for name, value in settings.items():
            setattr(instance, name, value)
        self._names = [name for name in names if hasattr(upstream, name)]
        swaps = [Swap(getattr(upstream, name), getattr(instance, names[name])) for name in self._names]
        for name, swap in zip(self._names, swaps):
            swap.new.__module__, swap.new.__name__, swap.new.__qualname__ = upstream.__name__, name, name  # for pickle
        self._swaps = replace_everywhere(swaps)
        if any(getattr(upstream, name) is swap.old for name, swap in zip(self._names, swaps)):
            replace_everywhere(backwards(self._swaps))
            raise UsageError(
                f"The references to {self._upstream} could not be found: `gc.freeze()` hides them. Install the drop-in "
                "before that, or call `gc.unfreeze()` first."
            )
        # Only now: what is in a dict would have been replaced.
        instance.replaced = {name: swap.old for name, swap in zip(self._names, swaps)}  # type: ignore[attr-defined]
        _active.append(self)

    def __repr__(self) -> str:
        state = "installed" if self in _active else "taken back"
        return f"<reactivate in the place of {self._upstream}, {state}: {', '.join(self._names)}>"

    def remove(self) -> None:
        """Put the library's functions back, also where they were imported from it in the meantime.

        Raises:
            UsageError: this was done before.
        """
        if self not in _active:
            raise UsageError("This installation was taken back already.")
        _active.remove(self)
        replace_everywhere(backwards(self._swaps))

    def __enter__(self) -> Installation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.remove()


def library(name: str, asked_by: str) -> ModuleType:
    """Import the module that a drop-in takes the place of.

    Raises:
        UsageError: it is not installed, or cannot be imported here.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UsageError(
            f"{asked_by} takes the place of {name}, which cannot be imported ({error}). Without it, call the functions of "
            "the drop-in themselves."
        ) from error


def _second_instance(module: ModuleType) -> ModuleType:
    """The module once more: functions of its own, so that a reference to one of them stems from the installation."""
    spec = module.__spec__
    assert spec is not None
    assert spec.loader is not None
    instance = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(instance)
    return instance

"""Private names of torch that may be gone.

A name that this torch does not have stops no import: it becomes a `Missing`, which raises when somebody uses it. Where
there is another way, `first_of` takes it.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

from reactivate.errors import UnsupportedError


class Missing:
    """A name that a namespace does not have.

    Raises:
        UnsupportedError: when it is called.
    """

    def __init__(self, path: str) -> None:
        self._path = path

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Missing(f"{self._path}.{name}")

    def __instancecheck__(self, value: Any) -> bool:
        return False  # nothing is of a type that there is not

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise UnsupportedError(
            f"This torch has no `{self._path}`, which this version of reactivate needs here. Install a newer reactivate, or "
            "a torch that it was tested with."
        )


class Names:
    """A module whose missing names are `Missing`."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        path = f"{self._module.__name__}.{name}"
        found = getattr(self._module, name, None)
        if found is None:
            return Missing(path)
        return Names(found) if isinstance(found, ModuleType) else found


def names_of(path: str) -> Any:
    """Return the names of the module `path`, `Missing` if there is no such module."""
    try:
        return Names(importlib.import_module(path))
    except ImportError:
        return Missing(path)


def is_missing(found: Any) -> bool:
    """Return whether a name was not found."""
    return isinstance(found, Missing)


def first_of(*found: Any) -> Any:
    """Return the first of several ways to do something that is not `Missing`; the last one, if all are."""
    return next((item for item in found if not is_missing(item)), found[-1])

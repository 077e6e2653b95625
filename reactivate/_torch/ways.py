"""Two ways to ask torch for something: a private name, fast, and a public one beside it.

A private name is taken if a probe finds that it does what it is relied on for, and never by a version number. One that is
gone, or does something else, stops no import: the public way takes its place. Where there is none, what has been looked for
raises when it is used, and says so.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

import torch

from reactivate.errors import UnsupportedError


class Way(NamedTuple):
    """One thing that torch is asked for.

    Attributes:
        names: the private names.
        what: what they are for.
        is_fast: whether they are there and do it.
        lost: what is lost where they are not, empty if there is a public way as well.
    """

    names: tuple[str, ...]
    what: str
    is_fast: bool
    lost: str = ""


ways: list[Way] = []
"""All of them, in the order in which they were looked for."""

Place = TypeVar("Place")


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
            f"This torch has no `{self._path}` that does what this version of reactivate needs here. Install a newer "
            "reactivate, or a torch that it was tested with. (`reactivate doctor` lists what else is missing.)"
        )


def find(path: str) -> Any:
    """Return what torch has under a name such as `torch._C._autograd.SavedTensor`, or a `Missing`."""
    parts = path.split(".")
    found: Any = importlib.import_module(parts[0])
    for index, part in enumerate(parts[1:], 1):
        inner = getattr(found, part, None)
        if inner is None and isinstance(found, ModuleType):
            inner = _module(".".join(parts[: index + 1]))
        if inner is None:
            return Missing(path)
        found = inner
    return found


def _module(path: str) -> Any:
    try:
        return importlib.import_module(path)
    except ImportError:
        return None


def is_missing(found: Any) -> bool:
    """Return whether a name was not found."""
    return isinstance(found, Missing)


def fastest(
    what: str, *names: str, probe: Callable[..., bool], public: Any = None, without: Any = None, lost: str = ""
) -> Any:
    """Return what private names stand for if they do what they are relied on for, otherwise the public way.

    Args:
        what: what they are for.
        names: what is needed together, from `torch` on.
        probe: tries it out: (what the names stand for) -> whether it does it. It may raise. It leaves everything as it was:
            it runs no backward, which would start threads, and initialises no device.
        public: what does the same; with several names one for each. None if there is nothing.
        without: what to use where there is neither. None if what needs it cannot work.
        lost: what does not work then, or works less well.

    Returns:
        one of these; with several names a tuple.
    """
    found = tuple(map(find, names))
    is_fast = not any(map(is_missing, found)) and _holds(probe, found)
    ways.append(Way(names, what, is_fast, lost))
    if is_fast:
        return found if len(found) > 1 else found[0]
    if public is not None or without is not None:
        return without if public is None else public
    gone = tuple(map(Missing, names))
    return gone if len(gone) > 1 else gone[0]


def _holds(probe: Callable[..., bool], found: tuple[Any, ...]) -> bool:
    try:
        with torch.inference_mode(False), torch.enable_grad():  # whatever is around the import
            return bool(probe(*found))
    except Exception:  # whatever it raises, it is not what was expected: the public way is taken, and `ways` tells
        return False


def layout(what: str, find_it: Callable[[], Place | None]) -> Place | None:
    """Return where something stands in memory, as far as that can be verified; None where the public way is to be taken.

    Args:
        what: what stands there.
        find_it: finds it, and tries it out.
    """
    try:
        found = find_it()
    except Exception:  # a layout that is not as expected may raise anything: likewise
        found = None
    ways.append(Way((), what, found is not None))
    return found

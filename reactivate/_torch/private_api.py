"""Private names of torch: where there is another way, a probe tries the name out, and the way is taken if it fails.

No version number is read. A name that is gone stops no import: where there is no public way, what has been looked for
raises when it is used, and says so.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from threading import RLock
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

import torch
from torch.autograd.graph import saved_tensors_hooks

from reactivate.errors import UnsupportedError

Place = TypeVar("Place")


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


class Missing:
    """A name that a namespace does not have: nothing is of that type, and to call it raises `UnsupportedError`."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Missing(f"{self._path}.{name}")

    def __instancecheck__(self, value: Any) -> bool:
        return False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise UnsupportedError(
            f"This torch has no `{self._path}` that does what this version of reactivate needs here. Install a newer "
            "reactivate, or a torch that it was tested with. (`reactivate doctor` lists what else is missing.)"
        )


def is_missing(found: Any) -> bool:
    """Return whether a name was not found."""
    return isinstance(found, Missing)


def find(path: str) -> Any:
    """Return what torch has under a name such as `torch._C._autograd.SavedTensor`, or a `Missing`."""
    parts = path.split(".")
    found: Any = importlib.import_module(parts[0])
    for count, part in enumerate(parts[1:], 2):
        inner = getattr(found, part, None)
        if inner is None and isinstance(found, ModuleType):
            with contextlib.suppress(ImportError):
                inner = importlib.import_module(".".join(parts[:count]))
        if inner is None:
            return Missing(path)
        found = inner
    return found


def resolve_private(
    what: str,
    *names: str,
    probe: Callable[..., bool] | None = None,
    public: Any = None,
    without: Any = None,
    lost: str = "",
) -> Any:
    """Return what private names stand for if they do what they are relied on for, otherwise the public way.

    Args:
        what: what they are for.
        names: what is needed together, from `torch` on.
        probe: tries it out: (what the names stand for) -> whether it does it. It may raise. It leaves everything as it was:
            it runs no backward, which would start threads, and initialises no device. Without one it is enough that the
            names are there: where there is nothing else to take, and one that does something else is seen at once.
        public: what does the same; with several names one for each. None if there is nothing.
        without: what to use where there is neither. None if what needs it cannot work.
        lost: what does not work then, or works less well.

    Returns:
        one of these; with several names a tuple.
    """
    found: Any = tuple(map(find, names))
    is_fast = not any(map(is_missing, found)) and (probe is None or bool(_tried(probe, found)))
    ways.append(Way(names, what, is_fast, lost))
    if not is_fast and (public is not None or without is not None):
        return without if public is None else public
    if not is_fast:
        found = tuple(map(Missing, names))
    return found if len(found) > 1 else found[0]


def layout(what: str) -> Callable[[Callable[[], Place | None]], Callable[[], Place | None]]:
    """Let a function that finds where something stands in memory, and tries that out, be called once.

    It returns None where that cannot be verified: then the public way is to be taken.

    Args:
        what: what stands there.
    """

    def verified(find_it: Callable[[], Place | None]) -> Callable[[], Place | None]:
        @functools.cache
        def found_once() -> Place | None:
            found: Place | None = _tried(find_it, ())
            ways.append(Way((), what, found is not None))
            return found

        return found_once

    return verified


def _tried(probe: Callable[..., Any], found: tuple[Any, ...]) -> Any:
    """Return what a probe does; None where it raises, whatever that is: what it looks at is not as expected."""
    try:
        with torch.inference_mode(False), torch.enable_grad(), _own_hooks():  # whatever is around the import
            return probe(*found)
    except Exception:
        return None


def _own_hooks() -> AbstractContextManager[Any]:
    """Return a context in which saved-tensor hooks of the user's, if there are any, are given no tensor."""
    top = find("torch._C._autograd._top_saved_tensors_default_hooks")
    if is_missing(top) or top(True) is None:
        return contextlib.nullcontext()
    return saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)


class Replaced:
    """Attributes of classes and modules that have other values as long as anyone wants it, on whatever thread.

    Args:
        places: () -> (owner, name, value) of each.
    """

    def __init__(self, places: Callable[[], Iterable[tuple[Any, str, Any]]]) -> None:
        self._places = places
        self._changing = RLock()
        self._users = 0
        self._replaced: list[tuple[Any, str, Any, Any]] = []  # (owner, name, what is there, what was there)

    def begin(self) -> None:
        """Put the values there, unless they are there."""
        with self._changing:
            self._users += 1
            if self._users == 1:
                for owner, name, value in self._places():
                    self._replaced.append((owner, name, value, vars(owner).get(name, _INHERITED)))
                    setattr(owner, name, value)

    def end(self) -> bool:
        """End what one `begin` began; return whether it was the last one."""
        with self._changing:
            self._users -= 1
            while self._replaced and not self._users:
                owner, name, value, original = self._replaced.pop()
                if vars(owner).get(name) is value:
                    delattr(owner, name) if original is _INHERITED else setattr(owner, name, original)
            return not self._users

    def __enter__(self) -> None:
        self.begin()

    def __exit__(self, *error: object) -> None:
        self.end()


_INHERITED = object()
"""What was there of an attribute that a base class has."""

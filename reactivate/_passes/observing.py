"""Contexts around regions: observers that are told what regions do, and code in which there are none."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import Context, ContextVar
from typing import Any, Protocol

from reactivate._setting import set_to


class Observer(Protocol):
    """An observer of regions. It may have methods for other events, too; see `tell`."""

    def forward_done(self, region: Any) -> None:
        """A region's forward pass is over."""

    def recomputation_done(self, region: Any) -> None:
        """A region was recomputed."""


_observer: ContextVar[Observer | None] = ContextVar("reactivate.observer", default=None)
observers: list[Observer] = []
"""Those that are at work in any context. Mostly empty, which is asked for every region."""

_without_regions: ContextVar[bool] = ContextVar("reactivate.without_regions", default=False)
are_regions_off: Callable[[], bool] = _without_regions.get
"""Return whether `without_regions` is around the call."""


@contextmanager
def observed_by(observer: Observer) -> Iterator[None]:
    """Tell `observer` of the regions that begin inside of the context."""
    observers.append(observer)
    try:
        with set_to(_observer, observer):
            yield
    finally:
        observers.remove(observer)


class _Keeping(threading.local):
    """The object that hands a tensor to autograd now, for an observer: a region its input, or a saved call what it keeps."""

    owner: Any = None


keeping = _Keeping()


def keeping_for(owner: Any, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call `function(*args, **kwargs)`, which hands tensors to autograd for `owner`."""
    keeping.owner = owner
    try:
        return function(*args, **kwargs)
    finally:
        keeping.owner = None


def tell(context: Context, event: str, argument: Any) -> None:
    """Tell the observer of the context in which a region began, if it has a method for the event.

    Beside those of every `Observer`: `call_begins(call)`, `recomputation_begins(region)`.
    """
    notice = getattr(context.get(_observer), event, None)
    if notice is not None:
        notice(argument)


def without_regions() -> AbstractContextManager[None]:
    """Make checkpointed functions plain inside of the context."""
    return set_to(_without_regions, True)

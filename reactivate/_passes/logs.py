"""Which log the calls on this thread go to: that of a region with a policy, or none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from reactivate._setting import set_to
from reactivate._snapshot.kinds import is_of_torch, package_of
from reactivate._torch.modes import (
    dispatch_modes,
    function_modes,
    is_dispatch_mode_active,
    is_function_mode_active,
    replace_dispatch_modes,
    replace_function_modes,
)

log_of_calls: ContextVar[Any] = ContextVar("reactivate.saved_calls", default=None)
"""The log of this thread. A region without a policy inside of one with a policy is no affair of its."""


def current_log() -> Any:
    """Return the log that notes or skips saved calls: None outside of regions with a policy, and inside of a saved call."""
    log = log_of_calls.get()
    return None if log is None or log.is_inside else log


@contextmanager
def set_aside() -> Iterator[None]:
    """Let no log be at work on this thread for the time of the context."""
    log = log_of_calls.get()
    if log is not None:
        log.finish_pending()
    with set_to(log_of_calls, None):
        yield


def is_seen() -> bool:
    """Return whether a mode would see an op that is made now."""
    return is_function_mode_active() or is_dispatch_mode_active() > 0


def is_seen_by_users() -> bool:
    """Return whether code of the user's would see an op that is made now."""
    return is_seen() and not all(map(is_of_torch, map(type, (*function_modes(), *dispatch_modes()))))


def unseen(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function unseen by the modes around it: what is looked at and kept here are not the user's calls.

    The planner's modes do see it: what a region keeps, and moves to a storage, is memory and time of a step.
    """
    if not is_seen():
        return function(*args)
    modes, dispatching = function_modes(), dispatch_modes()
    try:
        replace_function_modes(())  # `without_function_modes` would make plain tensors of subclasses
        replace_dispatch_modes(tuple(filter(_counts_regions, dispatching)))
        return function(*args)
    finally:
        try:
            _put_back(modes, dispatching)
        except BaseException:  # an interrupt
            _put_back(modes, dispatching)
            raise


def _counts_regions(mode: Any) -> bool:
    return package_of(type(mode)) == "reactivate" and not getattr(mode, "is_of_users_ops", False)


def _put_back(modes: tuple[Any, ...], dispatching: tuple[Any, ...]) -> None:
    replace_dispatch_modes(dispatching)
    replace_function_modes(modes)

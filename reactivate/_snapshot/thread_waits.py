"""Which thread another one waits for: it goes on when that one has ended, or a call on it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import Future
from threading import Thread
from types import FrameType

_JOIN, _RESULT = Thread.join.__code__, Future.result.__code__


def waits_for(waiting: int, thread: int) -> bool:
    """Return whether a thread can go on only after another has ended what it does.

    It joins that thread, or asks for the result of what an executor runs there, without a limit of time; or it waits in this
    way for a thread that does.

    Args:
        waiting: the id of the thread that may wait.
        thread: the id of the other, which runs this.
    """
    frames = sys._current_frames()
    seen: set[int] = set()
    while waiting != thread:
        seen.add(waiting)
        found = _awaited(frames.get(waiting), frames)
        if found is None or found in seen:
            return False
        waiting = found
    return bool(seen)


def _awaited(frame: FrameType | None, frames: dict[int, FrameType]) -> int | None:
    """Return the thread that one waits for, by its innermost frame; None if it does not, or for something else."""
    for outer in _outwards(frame):
        if outer.f_code in (_JOIN, _RESULT):
            awaited, timeout = outer.f_locals["self"], outer.f_locals["timeout"]
            if timeout is not None:
                return None
            return awaited.ident if isinstance(awaited, Thread) else _thread_of(awaited, frames)
        if outer.f_globals.get("__name__") != "threading":
            return None
    return None


def _thread_of(future: Future[object], frames: dict[int, FrameType]) -> int | None:
    """Return the thread on which a call runs that an executor was given."""
    for thread, frame in frames.items():
        for outer in _outwards(frame):
            is_executor = outer.f_globals.get("__name__") == "concurrent.futures.thread"
            if is_executor and any(getattr(value, "future", None) is future for value in outer.f_locals.values()):
                return thread
    return None


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back

"""The lock of state that threads share: recomputations set it back one at a time, where they reach the same (Rule 14)."""

from __future__ import annotations

from _thread import allocate_lock, get_ident
from collections.abc import Callable
from contextvars import ContextVar
from enum import IntEnum
from functools import partial
from threading import Condition
from time import monotonic

from reactivate._snapshot.thread_waits import waits_for
from reactivate._text.warnings import warn

PATIENCE_SECONDS = 60.0
_LOOK_AGAIN_SECONDS = 0.05  # whether another thread has begun to wait for this one


class Scope(IntEnum):
    """State that a recomputation sets back: none, tensors that it reaches, or what all threads share, as random numbers."""

    NOTHING = 0
    TENSORS = 1
    EVERYTHING = 2


class LockEntry:
    """One recomputation that reads shared state; no other is equal, so that one is found among hundreds at no cost.

    Args:
        read_memory: returns the memory of all tensors that it reads as they are; None where that cannot be told.

    Attributes:
        thread: its thread.
        around: the entries that it is inside of, or whose threads wait for its own.
        scope: what it has set back.
    """

    __slots__ = ("around", "read_memory", "scope", "thread")

    def __init__(self, read_memory: Callable[[], frozenset[int] | None]) -> None:
        self.thread, self.around, self.read_memory = get_ident(), _entered.get(), read_memory
        self.scope = Scope.NOTHING

    def leave(self) -> None:
        """End what `StateLock.join` began, as far as it came: all that was set back is as it was."""
        inside = STATE_LOCK.inside
        if self in inside:
            inside.remove(self)
        self.read_memory = frozenset  # contexts of regions that began inside of this have it
        if self.scope or STATE_LOCK.waiting:
            STATE_LOCK.wake(self)

    def disturbs(self, other: LockEntry) -> bool:
        """Return whether another recomputation could see what this one sets back."""
        if self.scope is not Scope.TENSORS:
            return self.scope is Scope.EVERYTHING
        own, others = self.read_memory(), other.read_memory()
        return own is None or others is None or not own.isdisjoint(others)


_entered: ContextVar[tuple[LockEntry, ...]] = ContextVar("reactivate.entered_state_locks", default=())
"""The entries that the code is inside of. A region that begins there has them in its context, on whatever thread it is
recomputed: torch may run a backward that a recomputation waits for on another thread."""


class StateLock:
    """Let many recomputations read shared state as it is, or set back what no other one reads meanwhile.

    Recomputations that find nothing to set back run side by side, and take no mutex: they only enter themselves in `inside`.
    So do those that set back tensors which the others do not reach: buffers of another model. One that sets back what all
    threads share runs alone: it waits until those of other threads have ended, or wait themselves.

    A reader enters itself before it looks for writers, and a writer before it looks for readers, so that one of them sees
    the other. Likewise a thread waits in `waiting` before it looks again, and one that leaves looks there afterwards.
    """

    def __init__(self) -> None:
        self.inside: list[LockEntry] = []  # the writers as well
        self.writers: list[LockEntry] = []
        self.waiting: list[int] = []  # threads
        self._mutex = allocate_lock()
        self._changed = Condition(self._mutex)

    def join(self, entry: LockEntry) -> None:
        """Wait until no other thread has set back what this recomputation reads, and keep it so until the entry leaves."""
        _entered.set((*entry.around, entry))
        self.inside.append(entry)
        if self.writers and not self._may_read(entry):
            with self._mutex:
                self._wait(self._may_read, entry)

    def take_turn_if(self, differs: Callable[[], Scope]) -> None:
        """Wait until the recomputation that runs here may set state back, if anything differs.

        There is no wait outside of recomputations, where a tool goes back to the state of a step.

        Args:
            differs: () -> what is to be set back. What it has looked at last holds for what comes next.
        """
        scope = differs()
        if not (scope and (entered := _entered.get())):
            return
        entry = entered[-1]
        before = entry.scope
        with self._mutex:
            while not self._may_set_back(entry, scope):
                self._wait(partial(self._may_set_back, scope=scope), entry)
                found = differs()  # another thread may have set state back meanwhile
                if found <= scope:
                    entry.scope = max(before, found)
                    if not entry.scope:
                        self.writers.remove(entry)
                    break
                scope = found

    def wake(self, entry: LockEntry) -> None:
        """Let others look again whether they may; an entry has just left `inside`."""
        with self._mutex:
            if entry in self.writers:
                self.writers.remove(entry)
            if self.waiting:
                self._changed.notify_all()

    def _may_read(self, entry: LockEntry) -> bool:
        return not any(writer.disturbs(entry) for writer in tuple(self.writers) if not _is_around(writer, entry))

    def _may_set_back(self, entry: LockEntry, scope: Scope) -> bool:
        """Enter a recomputation as a writer, unless another one would see that, or has set back what it reads."""
        before, entry.scope = entry.scope, max(entry.scope, scope)
        if not before:
            self.writers.append(entry)
        for other in tuple(self.inside):
            if _is_around(other, entry):
                continue
            is_seen = other.thread not in self.waiting and entry.disturbs(other)
            if is_seen or other.disturbs(entry):
                entry.scope = before
                if not before:
                    self.writers.remove(entry)
                return False
        return True

    def _wait(self, may: Callable[[LockEntry], bool], entry: LockEntry) -> None:
        self.waiting.append(entry.thread)
        self._changed.notify_all()  # one that waits for this thread need not any more
        end: float | None = monotonic() + PATIENCE_SECONDS
        try:
            while not may(entry):
                others = [other for other in self.inside if not _is_around(other, entry)]
                held_up = [other for other in others if waits_for(other.thread, entry.thread)]
                if held_up:  # they go on when this has ended: it is as if it ran on their thread
                    entry.around = (*entry.around, *held_up)
                    continue
                self._changed.wait(_LOOK_AGAIN_SECONDS)
                if end is not None and monotonic() > end:
                    end = None
                    warn(_WAITS_LONG)
        finally:
            self.waiting.remove(entry.thread)


_WAITS_LONG = (
    "A recomputation has waited for a minute for one on another thread: both set back what all threads share, such as "
    "torch's random numbers. If that one waits for this thread, in a barrier or a collective, neither goes on: run the two "
    "backwards one after the other, or leave out what need not be set back, as in "
    'checkpoint(fn, guards=DEFAULT.without("rng")).'
)


def _is_around(other: LockEntry, entry: LockEntry) -> bool:
    return other.thread == entry.thread or other in entry.around


STATE_LOCK = StateLock()

"""The lock of state that all threads share: recomputations set it back one at a time (Rule 14).

There is one lock for all of it: two recomputations that nest cannot take two locks in another order each.
"""

from __future__ import annotations

from _thread import allocate_lock, get_ident
from collections.abc import Callable
from contextvars import ContextVar
from threading import Condition


class LockEntry:
    """One recomputation that reads shared state; no other is equal, so that one is found among hundreds at no cost.

    Attributes:
        thread: its thread.
        around: the entries that it is inside of.
        turns: how many of its contexts have set state back.
    """

    __slots__ = ("around", "thread", "turns")

    def __init__(self, around: tuple[LockEntry, ...]) -> None:
        self.thread, self.around, self.turns = get_ident(), around, 0

    def __exit__(self, *error: object) -> None:
        STATE_LOCK.leave(self)


_entered: ContextVar[tuple[LockEntry, ...]] = ContextVar("reactivate.entered_state_locks", default=())
"""The entries that the code is inside of. A region that begins there has them in its context, on whatever thread it is
recomputed: torch may run a backward that a recomputation waits for on another thread."""


class StateLock:
    """Let many recomputations read shared state as it is, or one of them set it back.

    Recomputations that find nothing to set back run side by side, and take no mutex: they only enter themselves in `inside`.
    One that sets state back runs alone: it waits until those of other threads have ended, or wait themselves.

    A reader enters itself before it looks for a writer, and a writer before it looks for readers, so that one of them sees
    the other. Likewise a thread waits in `waiting` before it looks again, and one that leaves looks there afterwards.
    """

    def __init__(self) -> None:
        self.inside: list[LockEntry] = []  # the writer as well
        self.waiting: list[int] = []  # threads
        self._writer: LockEntry | None = None
        self._depth = 0  # of the contexts inside of each other in which the writer has set state back
        self._mutex = allocate_lock()
        self._changed = Condition(self._mutex)

    def join(self) -> LockEntry:
        """Wait until no other thread has state set back, and keep it so until `leave`, in this context."""
        around = _entered.get()
        entry = LockEntry(around)
        _entered.set((*around, entry))
        self.inside.append(entry)
        writer = self._writer
        if writer is not None and not _is_around(writer, entry):
            try:
                with self._mutex:
                    self._wait(self._may_join, entry)
            except BaseException:
                self.leave(entry)
                raise
        return entry

    def take_turn_if(self, differs: Callable[[], bool]) -> None:
        """Wait until the recomputation that runs here may set state back, if anything differs.

        There is no wait outside of recomputations, where a tool goes back to the state of a step.

        Args:
            differs: () -> whether anything is to be set back. What it has looked at last holds for what comes next.
        """
        if differs() and (entered := _entered.get()):
            self._take_turn(entered[-1], differs)

    def _take_turn(self, entry: LockEntry, differs: Callable[[], bool]) -> None:
        with self._mutex:
            writes = self._may_take_turn(entry)
            if not writes:  # another thread may set state back meanwhile
                self._wait(self._may_take_turn, entry)
                try:
                    writes = differs()
                finally:
                    if not (writes or self._depth):
                        self._writer = None
            self._depth += writes
            entry.turns += writes

    def leave(self, entry: LockEntry) -> None:
        """End what `join` began: all that was set back is as it was."""
        self.inside.remove(entry)
        if entry.turns or self.waiting:
            self._wake(entry.turns)

    def _wake(self, turns: int) -> None:
        """Let others look again whether they may; an entry has just left `inside`."""
        with self._mutex:
            self._depth -= turns
            if turns and not self._depth:
                self._writer = None
            if self.waiting:
                self._changed.notify_all()

    def _may_join(self, entry: LockEntry) -> bool:
        return self._writer is None or _is_around(self._writer, entry)

    def _may_take_turn(self, entry: LockEntry) -> bool:
        if self._writer is not None:
            return _is_around(self._writer, entry)
        self._writer = entry
        for reader in tuple(self.inside):
            if not (_is_around(reader, entry) or reader.thread in self.waiting):
                self._writer = None
                return False
        return True

    def _wait(self, may: Callable[[LockEntry], bool], entry: LockEntry) -> None:
        self.waiting.append(entry.thread)
        self._changed.notify_all()  # one that waits for this thread need not any more
        try:
            while not may(entry):
                self._changed.wait()
        finally:
            self.waiting.remove(entry.thread)


def _is_around(other: LockEntry, entry: LockEntry) -> bool:
    return other.thread == entry.thread or other in entry.around


STATE_LOCK = StateLock()

"""Random numbers (Rule 10): a recomputation draws those of its forward, and the streams move on only once.

A region refers to a snapshot of all streams, whether or not its function draws (see `_snapshot/random_streams.py`).
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

from reactivate._backends import backends
from reactivate._backends.base import Backend
from reactivate._setting import Rewound
from reactivate._snapshot.generators import (
    RandomStream,
    numpy_stream,
    python_stream,
    state_of_generator,
    torch_stream,
    ways_of,
)
from reactivate._snapshot.random_streams import STREAMS, RngSnapshot
from reactivate._snapshot.state_lock import STATE_LOCK, Scope
from reactivate._torch.autograd import current_backward, on_backward_end
from reactivate._torch.rng import accelerator_device
from reactivate._types import Call, Guard
from reactivate.errors import RecomputeMismatchError
from reactivate.guards.named_streams import StreamStates, trackers


class RngState(NamedTuple):
    """The streams of a region that may draw from more than those of the process.

    Attributes:
        streams: those of the process.
        devices: the states of the generators of every device; None of one that is not in use.
        others: (read, write, state, is_same) of every generator that the function reaches, and of every `RngTracker`:
            functions that read, write and compare its state, and the state.
    """

    streams: RngSnapshot
    devices: Sequence[tuple[Backend, Any]]
    others: Sequence[tuple[Any, ...]]


class RewoundRng:
    """Every stream as it was at a snapshot, for as long as the context lasts."""

    _others: Sequence[Any] = ()
    _rewound: Sequence[Any] = ()

    def __init__(self, snapshot: RngSnapshot | RngState) -> None:
        if type(snapshot) is RngState:
            self._others = [RewoundDevices(snapshot.devices), *(Rewound(*other) for other in snapshot.others)]
            snapshot = snapshot.streams
        self._snapshot: Any = snapshot
        self._present: Any = snapshot

    def __enter__(self) -> None:
        if self._others or STREAMS.look() != self._snapshot.seen:
            self._rewind()

    def _rewind(self) -> None:
        try:
            STATE_LOCK.take_turn_if(self._differs)
            STREAMS.rewind(self._snapshot, self._present.seen)
            for other in self._others:
                other.__enter__()
                self._rewound = [*self._rewound, other]
        except BaseException as error:
            self.__exit__(type(error), error, error.__traceback__)
            raise

    def _differs(self) -> Scope:
        self._present = STREAMS.now()
        is_other: bool = self._present.seen != self._snapshot.seen
        for other in self._others:  # each takes down what is there now
            is_other |= other.differs()
        return Scope.EVERYTHING if is_other else Scope.NOTHING

    def __exit__(self, *error: object) -> None:
        try:
            if self._rewound:
                for other in reversed(self._rewound):
                    other.__exit__(*error)
        finally:
            seen = STREAMS.look()
            if seen != self._present.seen:
                STREAMS.rewind(self._present, seen)
            STREAMS.last = self._present


class Rng(Guard):
    """Random numbers of every kind.

    Torch's generator of the CPU, Python's `random`, NumPy's global generator if NumPy is imported; the generators of every
    device, not of the arguments' devices alone, since a function may move a tensor; generators that the function reaches;
    the streams of every `RngTracker`.

    Args:
        backend: the one device type to restore; all that there are if None.
    """

    name = "rng"
    recompute = RewoundRng

    def __init__(self, backend: Backend | None = None) -> None:
        self._backends = None if backend is None else (backend,)

    def before(self, call: Call) -> RngSnapshot | RngState:
        snapshot = STREAMS.last
        if STREAMS.look() != snapshot.seen or (STREAMS.lacks_numpy and "numpy.random" in sys.modules):
            snapshot = STREAMS.now()
        has_more = trackers or call.generators or self._backends is not None
        if not has_more and accelerator_device() is None and "torch_xla" not in sys.modules:
            return snapshot
        devices = [(item, item.read_rng() if item.is_initialized() else None) for item in self._backends or backends()]
        others: list[Any] = [(*ways_of(item), state_of_generator(item), _needs_no_lock) for item in call.generators]
        for tracker in [reference() for reference in list(trackers)]:
            if tracker is not None:
                now = tracker.recompute_state()
                others.append((tracker.recompute_state, tracker.load_recompute_state, now, StreamStates.is_same))
        return RngState(snapshot, devices, others)

    def after(self, token: RngSnapshot | RngState) -> RngSnapshot | RngState:
        if isinstance(token, RngSnapshot):
            return token
        states = []
        for backend, before in token.devices:
            if before is None and backend.is_initialized():  # first initialised by the region
                before = backend.first_rng()
            if before is not None:
                states.append((backend, backend.rng_of_forward(before)))
        # Where no device is in use, a recomputation has nothing to look at beside the streams.
        return token._replace(devices=states) if states or token.others else token.streams

    def position(self, call: Call) -> Callable[[], None]:
        """Return what brings the streams to where they are now."""
        return functools.partial(_bring, self.before(call))


def _bring(state: RngSnapshot | RngState) -> None:
    """Bring the streams to where a saved call left them."""
    if isinstance(state, RngSnapshot):
        STREAMS.rewind(state)
        return
    STREAMS.rewind(state.streams)
    for backend, present in state.devices:
        if present is not None and backend.is_initialized():
            _rewind(backend, present)
    for _, write, left, _ in state.others:
        write(left)


def _needs_no_lock(now: Any, snapshot: Any) -> bool:
    """Count two states of a generator as the same: only one thread uses it, so rewinding it takes no lock."""
    return True


# -- devices ----------------------------------------------------------------------------------------------------------


class RewoundDevices:
    """Devices whose generators are set back; a state that is the present one is not written."""

    def __init__(self, snapshot: Sequence[tuple[Backend, Any]]) -> None:
        # A backend may keep a state for each thread, and have none on the one that a backward runs on.
        self._wanted = [(backend, state) for backend, state in snapshot if backend.is_initialized()]

    def differs(self) -> bool:
        """Return whether a generator has to be set back; `__enter__` comes next."""
        self._now = [(backend, backend.read_rng()) for backend, _ in self._wanted]
        return not all(
            backend.is_same_rng(present, state) for (backend, present), (_, state) in zip(self._now, self._wanted)
        )

    def __enter__(self) -> None:
        self._held = [
            None if backend.is_same_rng(present, state) else backend.exchange_rng(state)
            for (backend, present), (_, state) in zip(self._now, self._wanted)
        ]
        self._unseeded = [backend.count_unseeded() for backend, _ in self._now]

    def __exit__(self, *error: object) -> None:
        backward = current_backward()
        for (backend, present), held in zip(self._now, self._held):
            if held is None:
                _rewind(backend, present)
            elif backward == -1 or any(error):
                backend.write_rng(held)
            elif backend.give_back_rng(held, backward):
                _Settlement.of(backend, backward)
        if not any(error) or isinstance(error[1], RecomputeMismatchError):  # of which it may be the cause
            for (backend, _), count in zip(self._now, self._unseeded):
                backend.refuse_unseeded(count)


class _Settlement:
    """The end of a backward that has left something of a backend's generators to it.

    Autograd calls it when the backward has ended, and forgets it also after an error, without a call.
    """

    _open: ClassVar[set[tuple[Backend, int]]] = set()

    def __init__(self, backend: Backend, backward: int) -> None:
        self._key = backend, backward
        self._open.add(self._key)

    @classmethod
    def of(cls, backend: Backend, backward: int) -> None:
        """Settle when this backward, which is running, ends."""
        if (backend, backward) not in cls._open:
            on_backward_end(cls(backend, backward))

    def __call__(self) -> None:
        if self._key in self._open:
            self._open.discard(self._key)
            backend, backward = self._key
            backend.settle_rng(backward)

    __del__ = __call__


def _rewind(backend: Backend, state: Any) -> None:
    if not backend.is_same_rng(backend.read_rng(), state):
        backend.rewind_rng(state)


# -- reports ----------------------------------------------------------------------------------------------------------


def all_sources(call: Call) -> list[RandomStream]:
    """Return every generator that a call can draw from."""
    streams = [torch_stream(), python_stream()]
    numpy = numpy_stream() if "numpy.random" in sys.modules else None
    if numpy is not None:
        streams.append(numpy)
    for backend in backends():
        if backend.is_initialized():
            streams.append(
                RandomStream(backend.device_type, functools.partial(_read_whole, backend), backend.write_rng)
            )
    return streams + [RandomStream(f"generator {index}", *ways_of(item)) for index, item in enumerate(call.generators)]


def _read_whole(backend: Backend) -> Any:
    """Read all that it takes to bring the generators back, which `read_rng` of a backend may leave out for speed."""
    whole = backend.exchange_rng(backend.read_rng())
    backend.write_rng(whole)
    return whole

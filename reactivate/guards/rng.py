"""Random numbers (Rule 10): a recomputation draws those of its forward, and the streams move on only once.

A region refers to a snapshot of each stream, and whether it drew is never inferred (see `_engine/state/streams.py`).
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from operator import is_
from typing import Any, ClassVar

from reactivate._backends import Backend, backends
from reactivate._engine.state.streams import (
    Snapshot,
    Stream,
    numpy_stream,
    python_stream,
    set_state_of_generator,
    state_of_generator,
    torch_stream,
)
from reactivate._engine.state.turns import everybodys, undisturbed
from reactivate._torch.autograd import current_backward, on_backward_end
from reactivate._torch.flags import ask
from reactivate._types import Call, Guard
from reactivate.errors import RecomputeMismatchError
from reactivate.guards._base import Rewound


class HostRng(Guard):
    """Torch's generator of the CPU, Python's `random`, and NumPy's global generator if NumPy is imported."""

    name = "rng"

    def __init__(self) -> None:
        self._streams = [torch_stream(), python_stream()]
        self._index()

    def __reduce__(self) -> Any:
        return HostRng, ()  # a snapshot is of this process

    def _index(self) -> None:
        self._probes = [probe for stream in self._streams for probe in stream.probes]
        self._look()

    def _look(self) -> list[Snapshot]:
        """Take a snapshot of each stream, with what the probes told in that moment: another thread may draw in any other."""
        snapshots = [stream.snapshot() for stream in self._streams]
        self._known = [probed for snapshot in snapshots for probed in snapshot.fingerprint], snapshots
        return snapshots

    def before(self, call: Call) -> list[Snapshot]:
        if len(self._streams) == 2 and "numpy.random" in sys.modules:
            self._add_numpy()
        fingerprints, snapshots = self._known
        now = list(map(ask, self._probes))  # of all streams at once: this runs for every region
        return snapshots if now == fingerprints else self._look()

    def _add_numpy(self) -> None:
        stream = numpy_stream()
        if stream is not None:
            self._streams.append(stream)
            self._index()

    def rewind(self, snapshots: Sequence[Snapshot]) -> None:
        """Put the streams back to where they were."""
        fingerprints, known = self._known
        if snapshots is known and list(map(ask, self._probes)) == fingerprints:  # nobody has drawn since
            return
        for stream, snapshot in zip(self._streams, snapshots):
            stream.rewind(snapshot)

    def recompute(self, snapshot: list[Snapshot]) -> AbstractContextManager[Any]:
        return _RewoundStreams(self, snapshot)

    def skip(self, call: Call, token: Any) -> Callable[[], None]:
        return functools.partial(self.rewind, self.before(call))


_NO_CALL: Any = None


class _RewoundStreams:
    """The streams at a snapshot, for as long as the context lasts."""

    __slots__ = ("_guard", "_present", "_snapshot", "_turn")

    def __init__(self, guard: HostRng, snapshot: list[Snapshot]) -> None:
        self._guard = guard
        self._snapshot = snapshot

    def __enter__(self) -> None:
        self._turn = everybodys.enter(self._differs)
        if self._present is not self._snapshot:
            try:
                self._guard.rewind(self._snapshot)
            except BaseException:
                everybodys.leave(self._turn)
                raise

    def _differs(self) -> bool:
        present = self._present = self._guard.before(_NO_CALL)
        return present is not self._snapshot and not all(map(is_, present, self._snapshot))

    def __exit__(self, *error: object) -> None:
        try:
            self._guard.rewind(self._present)
        finally:
            everybodys.leave(self._turn)


def all_sources(call: Call) -> list[Stream]:
    """Return every generator that a call can draw from."""
    streams = [torch_stream(), python_stream()]
    numpy = numpy_stream() if "numpy.random" in sys.modules else None
    if numpy is not None:
        streams.append(numpy)
    for backend in backends():
        if backend.is_initialized():
            streams.append(Stream(backend.device_type, (), functools.partial(_read_whole, backend), backend.write_rng))
    for index, generator in enumerate(call.generators):
        read, write = (
            functools.partial(state_of_generator, generator),
            functools.partial(set_state_of_generator, generator),
        )
        streams.append(Stream(f"generator {index}", (), read, write))
    return streams


class DeviceRng(Guard):
    """The generators of every device but the CPU, through its device module.

    All of them, not those of the arguments' devices: a function may move a tensor.

    Args:
        backend: the device type; all that there are if None.
    """

    name = "rng"

    def __init__(self, backend: Backend | None = None) -> None:
        self._backends = None if backend is None else (backend,)

    def before(self, call: Call) -> Any:
        found = self._backends or backends()
        return [(item, item.read_rng() if item.is_initialized() else None) for item in found] if found else None

    def after(self, token: Any) -> Any | None:
        states = []
        for backend, before in token or ():
            if before is None and backend.is_initialized():  # first initialised by the region
                before = backend.first_rng()
            if before is not None:
                states.append((backend, backend.rng_of_forward(before)))
        return states or None

    def skip(self, call: Call, token: Any) -> Callable[[], None] | None:
        states = [(backend, backend.read_rng()) for backend, _ in token or () if backend.is_initialized()]
        return functools.partial(_bring, states) if states else None

    def recompute(self, snapshot: Any) -> AbstractContextManager[Any]:
        rewound = _RewoundDevices(snapshot)
        return undisturbed(rewound, rewound.differs)


class _RewoundDevices:
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


def _bring(states: Iterable[tuple[Backend, Any]]) -> None:
    for backend, state in states:
        if backend.is_initialized():
            _rewind(backend, state)


def _rewind(backend: Backend, state: Any) -> None:
    if not backend.is_same_rng(backend.read_rng(), state):
        backend.rewind_rng(state)


def _read_whole(backend: Backend) -> Any:
    """Read all that it takes to bring the generators back, which `read_rng` of a backend may leave out for speed."""
    whole = backend.exchange_rng(backend.read_rng())
    backend.write_rng(whole)
    return whole


def _write_all(states: Iterable[tuple[Callable[[Any], Any], Any]]) -> None:
    for write, state in states:
        write(state)


class Generators(Guard):
    """Generators that the function reaches: torch's, Python's, NumPy's."""

    name = "rng"

    def before(self, call: Call) -> Any:
        generators = call.generators
        return [(generator, state_of_generator(generator)) for generator in generators] if generators else None

    def skip(self, call: Call, token: Any) -> Callable[[], None] | None:
        states = [
            (functools.partial(set_state_of_generator, generator), state_of_generator(generator))
            for generator, _ in token or ()
        ]
        return functools.partial(_write_all, states) if states else None

    def recompute(self, snapshot: Any) -> AbstractContextManager[Any]:
        generators = [generator for generator, _ in snapshot]

        def read() -> Any:
            return list(map(state_of_generator, generators))

        def write(states: Any) -> None:
            for generator, state in zip(generators, states):
                set_state_of_generator(generator, state)

        return Rewound(read, write, [state for _, state in snapshot])

"""Random numbers (Rule 10): a replay draws those of the forward pass, and the streams move on only once.

A generator's state is kept only if the region drew from it. To ask for the whole state before and after every region is
slow: 0.5 us and 5 KB for torch's CPU generator, 6 us for Python's, 40 us for NumPy's. All three are Mersenne twisters:
each draw moves an index, and after 624 of them all words of the state are new. So the index and the first words, read
from memory, tell whether anything was drawn; a state is asked for when they are not those of the last time.
"""

from __future__ import annotations

import ctypes
import functools
import random
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch

from reactivate._backends import Backend, backends
from reactivate._compat import ask, cpu_generator_memory, equal_unseen
from reactivate._types import Call, Guard
from reactivate.guards._base import Rewound, undisturbed

_FIRST_WORDS = 16 * 4  # bytes


class Source(NamedTuple):
    """A generator.

    Attributes:
        name: what reports call it.
        probes: functions whose results are different after a draw.
        read: () -> the state.
        write: (state) -> None.
    """

    name: str
    probes: Sequence[Callable[[], Any]]
    read: Callable[[], Any]
    write: Callable[[Any], Any]


class HostRng(Guard):
    """torch's generator of the CPU, Python's `random`, and NumPy's global generator if NumPy is imported."""

    name = "rng"

    def __init__(self) -> None:
        self._sources = [_torch_source(), _python_source()]
        self._index()

    def __reduce__(self) -> Any:
        return HostRng, ()  # what it remembers is of this process

    def _index(self) -> None:
        self._probes = [probe for source in self._sources for probe in source.probes]
        self._owners = [owner for owner, source in enumerate(self._sources) for _ in source.probes]
        self._known = (list(map(ask, self._probes)), [source.read() for source in self._sources])

    def before(self, call: Call) -> Any:
        if len(self._sources) == 2 and "numpy.random" in sys.modules:
            self._add_numpy()
        fingerprint = list(map(ask, self._probes))
        known = self._known
        if known[0] != fingerprint:
            states = [*known[1]]
            for owner in self._differing(known[0], fingerprint):
                states[owner] = self._sources[owner].read()
            known = self._known = (fingerprint, states)
        return known

    def _add_numpy(self) -> None:
        source = _numpy_source(sys.modules["numpy.random"])
        if source is not None:
            self._sources.append(source)
            self._index()

    def after(self, token: Any) -> Any | None:
        fingerprint = list(map(ask, self._probes))
        if fingerprint == token[0]:
            return None
        return [(self._sources[owner], token[1][owner]) for owner in self._differing(token[0], fingerprint)]

    def skip(self, call: Call, token: Any) -> Callable[[], None] | None:
        fingerprint = list(map(ask, self._probes))
        if fingerprint == token[0]:
            return None
        sources = [self._sources[owner] for owner in self._differing(token[0], fingerprint)]
        states = [(source.write, source.read()) for source in sources]
        return functools.partial(_write_all, states)

    def _differing(self, one: list[Any], other: list[Any]) -> set[int]:
        return {owner for owner, first, second in zip(self._owners, one, other) if first != second}

    def replay(self, snapshot: Any) -> AbstractContextManager[Any]:
        sources = [source for source, _ in snapshot]

        def write(states: list[Any]) -> None:
            for source, state in zip(sources, states):
                source.write(state)

        states = [state for _, state in snapshot]
        return undisturbed(Rewound(lambda: [source.read() for source in sources], write, states))


def _write_all(states: Sequence[tuple[Callable[[Any], Any], Any]]) -> None:
    for write, state in states:
        write(state)


def all_sources(call: Call) -> list[Source]:
    """Every generator that a call can draw from."""
    sources = [_torch_source(), _python_source()]
    numpy = _numpy_source(sys.modules["numpy.random"]) if "numpy.random" in sys.modules else None
    if numpy is not None:
        sources.append(numpy)
    for backend in backends():
        if backend.is_initialized():
            sources.append(Source(backend.device_type, (), backend.read_rng, backend.write_rng))
    for index, generator in enumerate(call.generators):
        read, write = functools.partial(_get_state, generator), functools.partial(_set_state, generator)
        sources.append(Source(f"generator {index}", (), read, write))
    return sources


def _probe(address: int, size: int) -> Callable[[], bytes]:
    """What is in memory there: 0.1 us."""
    return functools.partial(getattr, (ctypes.c_char * size).from_address(address), "raw")


def _torch_source() -> Source:
    generator = torch.default_generator
    memory = cpu_generator_memory()
    probes = [_ask_torch] if memory is None else [_probe(*place) for place in memory]
    return Source("torch's CPU generator", probes, generator.get_state, generator.set_state)


def _ask_torch() -> Any:
    state = torch.default_generator.get_state()
    # Under a fake-tensor mode the state has no bytes, and nothing is drawn.
    return bytes(state.tolist()) if type(state) is torch.Tensor else None


def _python_source() -> Source:
    generator: Any = random.getstate.__self__  # type: ignore[attr-defined]
    probes: list[Callable[[], Any]] = [random.getstate]
    if sys.implementation.name == "cpython":
        # The index and the words lie behind the object's header; a spare normal number is an attribute.
        words = _probe(id(generator) + object.__basicsize__, _FIRST_WORDS)
        probes = [words, functools.partial(getattr, generator, "gauss_next")]
    return Source("Python's random", probes, random.getstate, random.setstate)


def _numpy_source(module: Any) -> Source | None:
    if not hasattr(module, "set_state"):  # it is being imported
        return None
    probes: list[Callable[[], Any]] = [lambda: repr(module.get_state(legacy=False))]
    if sys.implementation.name == "cpython" and hasattr(module, "get_bit_generator"):
        bit_generator, generator = module.get_bit_generator(), module.get_state.__self__
        if type(bit_generator).__name__ == "MT19937":  # it can be replaced, by `set_bit_generator`
            header, twister = object.__basicsize__, int(bit_generator.ctypes.state_address)
            probes = [
                _probe(twister, _FIRST_WORDS),
                _probe(twister + 624 * 4, 4),  # the index
                # The generator object: it has a spare normal number, and refers to the twister.
                _probe(id(generator) + header, type(generator).__basicsize__ - header),
            ]
    return Source("NumPy's random", probes, lambda: module.get_state(legacy=False), module.set_state)


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
            if before is None:  # first initialised by the region, or not at all
                first = backend.first_rng() if backend.is_initialized() else None
                states += [] if first is None else [(backend, first)]
            elif not backend.is_same_rng(before, backend.read_rng()):
                states.append((backend, before))
        return states or None

    def skip(self, call: Call, token: Any) -> Callable[[], None] | None:
        changed = []
        for backend, before in token or ():
            if backend.is_initialized():
                now = backend.read_rng()
                if before is None or not backend.is_same_rng(before, now):
                    changed.append((backend.write_rng, now))
        return functools.partial(_write_all, changed) if changed else None

    def replay(self, snapshot: Any) -> AbstractContextManager[Any]:
        found = [backend for backend, _ in snapshot]

        def write(states: list[Any]) -> None:
            for backend, state in zip(found, states):
                backend.write_rng(state)

        return undisturbed(
            Rewound(lambda: [backend.read_rng() for backend in found], write, [state for _, state in snapshot])
        )


class Generators(Guard):
    """Generators among the arguments and in closures: torch's, Python's, NumPy's."""

    name = "rng"

    def before(self, call: Call) -> Any:
        generators = call.generators
        return [(generator, _get_state(generator)) for generator in generators] if generators else None

    def after(self, token: Any) -> Any | None:
        return None if token is None else [pair for pair in token if not _is_at(*pair)] or None

    def skip(self, call: Call, token: Any) -> Callable[[], None] | None:
        drawn = [generator for generator, state in token or () if not _is_at(generator, state)]
        states = [(functools.partial(_set_state, generator), _get_state(generator)) for generator in drawn]
        return functools.partial(_write_all, states) if states else None

    def replay(self, snapshot: Any) -> AbstractContextManager[Any]:
        generators = [generator for generator, _ in snapshot]

        def read() -> Any:
            return [_get_state(generator) for generator in generators]

        def write(states: Any) -> None:
            for generator, state in zip(generators, states):
                _set_state(generator, state)

        return Rewound(read, write, [state for _, state in snapshot])


def _get_state(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    bit_generator = getattr(generator, "bit_generator", None)
    return generator.get_state(legacy=False) if bit_generator is None else bit_generator.state


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, torch.Generator) or not hasattr(generator, "bit_generator"):
        generator.set_state(state)
    else:
        generator.bit_generator.state = state


def _is_at(generator: Any, state: Any) -> bool:
    now = _get_state(generator)
    if isinstance(now, torch.Tensor):
        return equal_unseen(now, state)
    return repr(now) == repr(state)  # nested dicts with arrays in them

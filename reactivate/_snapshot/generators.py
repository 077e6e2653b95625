"""Random number generators: where each keeps its state in memory, and public functions where that is not known.

Looking at a generator costs a copy of a few bytes where its memory can be read. All three are Mersenne twisters: the index
moves with each draw and after 624 draws every word is new, so index and first words tell two states apart. Each memory layout
is tried out on a generator of our own before it is relied on; where it does not hold, the public functions serve, which cost
up to 40 us to read and 100 us to write.
"""

from __future__ import annotations

import ctypes
import functools
import random
import struct
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from reactivate._torch.private_api import layout
from reactivate._torch.rng import cpu_generator_memory

_WORDS = 624 * 4  # bytes
_FIRST_WORDS = 16 * 4
_ALL = slice(None)


class RandomStream(NamedTuple):
    """A random number generator that all code of the process shares.

    Attributes:
        name: for reports.
        read: () -> the state, which does not change afterwards.
        write: (state) -> None.
        memory: views of bytes that differ after a draw.
        ask: () -> what else differs after a draw; None if nothing does.
        spare: a view of numbers that count if one of the first two bytes of `memory` is not 0. In the place of one that is
            used up, or of none in a state that is set, torch leaves any bytes.
        for_reports: () -> the state for comparisons, where two reads of equal states may differ.
    """

    name: str
    read: Callable[[], Any]
    write: Callable[[Any], Any]
    memory: Sequence[memoryview] = ()
    ask: Callable[[], Any] | None = None
    spare: memoryview | None = None
    for_reports: Callable[[], Any] | None = None

    def told(self) -> Any:
        """Return the state for comparisons."""
        return (self.for_reports or self.read)()


# -- torch ------------------------------------------------------------------------------------------------------------


def torch_stream() -> RandomStream:
    """Return torch's generator of the CPU."""
    generator: Any = torch.default_generator
    memory = cpu_generator_memory()
    if memory is None:
        return RandomStream("torch's CPU generator", generator.get_state, generator.set_state, ask=_torch_state_bytes)
    start = generator._cdata
    whole, spare, *views = (_view(start + at, size) for at, size in (memory.whole, memory.spare, *memory.seen))
    write = functools.partial(whole.__setitem__, _ALL)
    # For reports the public bytes: in memory there are padding, and a spare number that is used up.
    return RandomStream(
        "torch's CPU generator", whole.tobytes, write, views, spare=spare, for_reports=_torch_state_bytes
    )


def _torch_state_bytes() -> Any:
    state = torch.default_generator.get_state()
    # Under a fake-tensor mode the state has no bytes, and nothing is drawn.
    return ctypes.string_at(state.data_ptr(), state.nbytes) if type(state) is torch.Tensor else None


# -- Python -----------------------------------------------------------------------------------------------------------


def python_stream() -> RandomStream:
    """Return the generator behind the functions of `random`."""
    generator: Any = random.getstate.__self__  # type: ignore[attr-defined]
    place = _python_words()
    if place is None:
        return RandomStream("Python's random", random.getstate, random.setstate, ask=random.getstate)
    offset, size = place
    whole = _view(id(generator) + offset, size)
    ask = functools.partial(getattr, generator, "gauss_next")

    def read() -> tuple[bytes, float | None]:
        return whole.tobytes(), generator.gauss_next

    def write(state: tuple[bytes, float | None]) -> None:
        whole[:], generator.gauss_next = state

    return RandomStream("Python's random", read, write, memory=[whole[:_FIRST_WORDS]], ask=ask)


@layout("the memory layout of Python's random")
def _python_words() -> tuple[int, int] | None:
    """Return (offset, bytes) of index and words in a `random.Random`, tried out by drawing; None if unknown."""
    if sys.implementation.name != "cpython":
        return None
    one, other = random.Random(5), random.Random(6)
    offset, size = object.__basicsize__, 4 + _WORDS
    if type(one).__basicsize__ < offset + size:
        return None
    one.random()
    _, words, _ = one.getstate()
    if ctypes.string_at(id(one) + offset, size) != struct.pack("<i624I", words[-1], *words[:-1]):
        return None
    ctypes.memmove(id(other) + offset, ctypes.string_at(id(one) + offset, size), size)
    is_right = [other.random() for _ in range(700)] == [one.random() for _ in range(700)]
    return (offset, size) if is_right and other.getstate() == one.getstate() else None


# -- NumPy ------------------------------------------------------------------------------------------------------------


def numpy_stream() -> RandomStream | None:
    """Return NumPy's global generator; None while NumPy is being imported."""
    module: Any = sys.modules["numpy.random"]
    if not hasattr(module, "set_state"):
        return None
    read = functools.partial(module.get_state, legacy=False)
    public = RandomStream("NumPy's random", read, module.set_state, ask=lambda: _comparable(read()))
    bit_generator: Any = module.get_bit_generator() if hasattr(module, "get_bit_generator") else None
    spare = _numpy_spare()
    if spare is None or type(bit_generator).__name__ != "MT19937":  # `set_bit_generator` may put another one there
        return public
    generator = module.get_state.__self__
    words, number = _view(int(bit_generator.ctypes.state_address), _WORDS + 4), _view(id(generator) + spare, 16)

    def read_memory(keeps: Any = bit_generator) -> tuple[bytes, bytes]:  # which lives as long as its memory is read
        return words.tobytes(), number.tobytes()

    def write_memory(state: tuple[bytes, bytes]) -> None:
        words[:], number[:] = state

    return RandomStream("NumPy's random", read_memory, write_memory, [words[:_FIRST_WORDS], words[_WORDS:], number])


def _comparable(state: Any) -> Any:
    """Return a state of NumPy's in parts that can be compared: bytes of arrays, of which `repr` may show but a few."""
    if isinstance(state, dict):
        return {name: _comparable(value) for name, value in state.items()}
    return state.tobytes() if hasattr(state, "tobytes") else state


@layout("the memory layout of NumPy's random")
def _numpy_spare() -> int | None:
    """Return where a `RandomState` keeps its spare normal number, tried out by drawing; None if unknown.

    Sixteen bytes: whether there is one (an int, padded), and the number.
    """
    if sys.implementation.name != "cpython":
        return None
    numpy: Any = sys.modules["numpy"]
    one, other = numpy.random.RandomState(5), numpy.random.RandomState(6)
    one.standard_normal()  # from now on it has a spare one
    size = type(one).__basicsize__
    offset = ctypes.string_at(id(one), size).find(struct.pack("<d", one.get_state(legacy=False)["gauss"])) - 8
    if offset < object.__basicsize__ or ctypes.string_at(id(one) + offset, 4) != struct.pack("<i", 1):
        return None
    here, there = (int(item._bit_generator.ctypes.state_address) for item in (one, other))
    ctypes.memmove(there, ctypes.string_at(here, _WORDS + 4), _WORDS + 4)
    ctypes.memmove(id(other) + offset, ctypes.string_at(id(one) + offset, 16), 16)
    is_right = list(one.standard_normal(701)) == list(other.standard_normal(701))
    return offset if is_right and repr(one.get_state(legacy=False)) == repr(other.get_state(legacy=False)) else None


# -- generators of the user's -----------------------------------------------------------------------------------------


def state_of_generator(generator: Any) -> Any:
    """Return the state of a generator of torch's, Python's or NumPy's."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    bits = getattr(generator, "bit_generator", generator)  # which a bare one is itself
    return bits.state if hasattr(bits, "state") else generator.get_state(legacy=False)


def set_state_of_generator(generator: Any, state: Any) -> None:
    """Set what `state_of_generator` returned."""
    bits = getattr(generator, "bit_generator", generator)
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, torch.Generator) or not hasattr(bits, "state"):
        generator.set_state(state)
    else:
        bits.state = state


def ways_of(generator: Any) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    """Return how to read and write the state of a generator."""
    return functools.partial(state_of_generator, generator), functools.partial(set_state_of_generator, generator)


def _view(address: int, size: int) -> memoryview:
    return memoryview((ctypes.c_char * size).from_address(address)).cast("B")

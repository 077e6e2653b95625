"""Devices beside the CPU, and the memory of torch's CPU generator."""

from __future__ import annotations

import ctypes
import struct
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from reactivate._torch.private_api import Replaced, layout, resolve_private

_current = torch.accelerator.current_accelerator

# `torch.accelerator.current_accelerator()` without a microsecond of Python.
accelerator_device: Callable[[], torch.device | None] = resolve_private(
    "the current accelerator",
    "torch._C._accelerator_getAccelerator",
    probe=lambda ask: getattr(ask(), "type", None) == getattr(_current(), "type", None),
    public=_current,
)
# What `torch.<device type>` is, for a device type that came without a module of its own.
register_device_module: Callable[[str, Any], None] = resolve_private(
    "registering the module of a device",
    "torch._register_device_module",
    lost="regions on XLA, with a torch_xla that registers none",
)


def xla_runtime() -> Any:
    """torch_xla's bindings, None as long as torch_xla is not imported: seeds, devices and barriers have public names only
    in part, and these initialise the runtime.
    """
    # The first half is all that most calls come to, and there are some for each region.
    return getattr(sys.modules["torch_xla"], "_XLAC", None) if "torch_xla" in sys.modules else None


_Span = tuple[int, int]
"""Where something begins, in bytes behind the address of a generator, and how many bytes it is."""


class GeneratorMemory(NamedTuple):
    """The places in which torch's generator of the CPU keeps its state.

    Attributes:
        seen: what differs after a draw, without padding: whether there is a spare normal number, one byte for single
            precision and one for double; its seed and how many words are left; its index and its first words.
        spare: both numbers, and what is between them; any bytes in the place of one that is not there.
        whole: all of it.
    """

    seen: tuple[_Span, _Span, _Span, _Span]
    spare: _Span
    whole: _Span


@layout("the memory layout of the CPU's generator")
def cpu_generator_memory() -> GeneratorMemory | None:
    """Return where the CPU's generator keeps its state: torch has no cheaper question than a tensor with all 5 KB of it.

    It is found in a generator of known content, and tried out by drawing from it and from a copy.
    """
    seed, head = 0x5EED5EED, 16 * 4  # bytes of words
    generator, other = torch.Generator(), torch.Generator()
    generator.manual_seed(seed)
    # seed: 8 bytes; left: 4; seeded: 1 and 3 of padding; next: 4; then 624 words, the first of which is the seed.
    # (`next` is not aligned to 8, so the words follow it at once.)
    offset = ctypes.string_at(generator._cdata, 192).find(struct.pack("<Qi", seed, 1))
    words = offset + struct.calcsize("<QiB3xI")
    second = (1812433253 * (seed ^ (seed >> 30)) + 1) & 0xFFFFFFFF
    if offset < 0 or ctypes.string_at(generator._cdata + words, 8) != struct.pack("<II", seed, second):
        return None
    # 4 bytes of padding; a float: 4, whether it is there: 1 and 3 of padding; a double: 8, whether it is there: 1.
    numbers = words + 624 * 4
    seen = (numbers + 8, 1), (numbers + 20, 1), (offset, 13), (words - 4, 4 + head)
    memory = GeneratorMemory(seen, (numbers + 4, 16), (offset, numbers + 24 - offset))

    def look() -> list[bytes]:
        return [ctypes.string_at(generator._cdata + start, count) for start, count in (*seen, memory.spare)]

    looks = [look()]
    for draw in (torch.rand, torch.randn, torch.randn):  # the second normal number is the spare of the first
        draw(1, generator=generator, device="cpu")
        looks.append(look())
    is_seen = len({(left, index) for *_, left, index, _ in looks}) == 3
    is_seen = is_seen and b"".join(is_double for _, is_double, *_ in looks) == b"\0\0\1\0"
    spare_float = [*struct.pack("<f?3x", 1.5, True)]  # which no op leaves behind by itself
    state = generator.get_state()
    state[-8:] = torch.tensor(spare_float, dtype=torch.uint8)
    generator.set_state(state)
    is_seen = is_seen and look()[:2] == [b"\1", b"\0"] and look()[4].startswith(struct.pack("<f", 1.5))
    ctypes.memmove(other._cdata + offset, generator._cdata + offset, memory.whole[1])
    is_copied = torch.equal(other.get_state(), generator.get_state()) and all(
        torch.equal(*(torch.randn(number, generator=item, device="cpu") for item in (generator, other)))
        for number in (1, 3, 700, 1)
    )
    return memory if is_seen and is_copied else None


class RandomStatesTaken(Replaced):
    """Tells of the states of the CPU's generator that programs take, as torch's checkpoint and `fork_rng` do.

    Args:
        tell: called with each state.
    """

    def __init__(self, tell: Callable[[Tensor], None]) -> None:
        take = torch.get_rng_state

        def taken() -> Tensor:
            state = take()
            tell(state)
            return state

        super().__init__(lambda: [(torch, "get_rng_state", taken)])

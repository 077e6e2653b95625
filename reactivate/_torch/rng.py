"""The memory of torch's CPU generator: torch has no cheaper question than a tensor with the whole state of 5 KB."""

from __future__ import annotations

import ctypes
import functools
import struct

import torch

from reactivate._torch.ways import layout

_Span = tuple[int, int]
"""An address, and a number of bytes."""


@functools.cache
def cpu_generator_memory() -> tuple[_Span, _Span, _Span] | None:
    """Return where the CPU's generator keeps its state; None where that is not as expected.

    First its seed, index and first words; then the spare normal numbers; then all of it.
    """
    return layout("the memory layout of the CPU's generator", _find)


def _find() -> tuple[_Span, _Span, _Span] | None:
    """Find the layout in a generator of known content, and try it out by drawing from it and from a copy."""
    seed, size = 0x5EED5EED, 24 + 16 * 4
    generator = torch.Generator()
    generator.manual_seed(seed)
    # seed: 8 bytes; left: 4; seeded: 1 and 3 of padding; next: 4; then 624 words, the first of which is the seed.
    # (`next` is not aligned to 8, so the words follow it at once.)
    expected = struct.pack("<Qi", seed, 1)
    offset = ctypes.string_at(generator._cdata, 192).find(expected)
    words = offset + struct.calcsize("<QiB3xI")
    second = (1812433253 * (seed ^ (seed >> 30)) + 1) & 0xFFFFFFFF
    if offset < 0 or ctypes.string_at(generator._cdata + words, 8) != struct.pack("<II", seed, second):
        return None
    spare = words + 624 * 4

    def look() -> tuple[bytes, bytes]:
        return ctypes.string_at(generator._cdata + offset, size), ctypes.string_at(generator._cdata + spare, 24)

    looks = [look()]
    for draw in (torch.rand, torch.randn, torch.randn):  # the second normal number is the spare of the first
        draw(1, generator=generator, device="cpu")
        looks.append(look())
    is_seen = looks[0][0] != looks[1][0] and looks[1] != looks[2] and looks[2][1] != looks[3][1]
    whole = spare + 24 - offset
    other = torch.Generator()
    ctypes.memmove(other._cdata + offset, generator._cdata + offset, whole)
    is_copied = torch.equal(other.get_state(), generator.get_state()) and all(
        torch.equal(*(torch.randn(number, generator=item, device="cpu") for item in (generator, other)))
        for number in (1, 3, 700, 1)
    )
    cdata = torch.default_generator._cdata
    if not (is_seen and is_copied):
        return None
    return (cdata + offset, size), (cdata + spare, 24), (cdata + offset, whole)

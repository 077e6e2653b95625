"""Devices beside the CPU, and the memory of torch's CPU generator."""

from __future__ import annotations

import ctypes
import functools
import struct
import sys
from collections.abc import Callable
from typing import Any

import torch

from reactivate._torch.private_api import layout, resolve_private

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
"""An address, and a number of bytes."""


@functools.cache
def cpu_generator_memory() -> tuple[_Span, _Span, _Span] | None:
    """Return where the CPU's generator keeps its state: torch has no cheaper question than a tensor with all 5 KB of it.

    First its seed, index and first words; then the spare normal numbers; then all of it. None where it is not as expected.
    """
    return layout("the memory layout of the CPU's generator", _find)


def _find() -> tuple[_Span, _Span, _Span] | None:
    """Find the layout in a generator of known content, and try it out by drawing from it and from a copy."""
    seed, size = 0x5EED5EED, 24 + 16 * 4
    generator, other = torch.Generator(), torch.Generator()
    generator.manual_seed(seed)
    # seed: 8 bytes; left: 4; seeded: 1 and 3 of padding; next: 4; then 624 words, the first of which is the seed.
    # (`next` is not aligned to 8, so the words follow it at once.)
    offset = ctypes.string_at(generator._cdata, 192).find(struct.pack("<Qi", seed, 1))
    words = offset + struct.calcsize("<QiB3xI")
    second = (1812433253 * (seed ^ (seed >> 30)) + 1) & 0xFFFFFFFF
    if offset < 0 or ctypes.string_at(generator._cdata + words, 8) != struct.pack("<II", seed, second):
        return None
    spare = words + 624 * 4
    whole = spare + 24 - offset

    def look() -> tuple[bytes, bytes]:
        return ctypes.string_at(generator._cdata + offset, size), ctypes.string_at(generator._cdata + spare, 24)

    looks = [look()]
    for draw in (torch.rand, torch.randn, torch.randn):  # the second normal number is the spare of the first
        draw(1, generator=generator, device="cpu")
        looks.append(look())
    is_seen = looks[0][0] != looks[1][0] and looks[1] != looks[2] and looks[2][1] != looks[3][1]
    ctypes.memmove(other._cdata + offset, generator._cdata + offset, whole)
    is_copied = torch.equal(other.get_state(), generator.get_state()) and all(
        torch.equal(*(torch.randn(number, generator=item, device="cpu") for item in (generator, other)))
        for number in (1, 3, 700, 1)
    )
    if not (is_seen and is_copied):
        return None
    cdata = torch.default_generator._cdata
    return (cdata + offset, size), (cdata + spare, 24), (cdata + offset, whole)

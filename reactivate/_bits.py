"""Checksums of the bits of tensors: exact, on their device, at the speed of memory, without a large temporary."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def checksum(flat: Tensor) -> Tensor:
    """Return a number, an int64 on the tensor's device, that depends on the bits of a tensor and on their order.

    Args:
        flat: dense, of one dimension, and no complex numbers.
    """
    count = len(flat)
    whole = count - count % (8 // flat.itemsize)
    can_be_cast = flat.storage_offset() * flat.itemsize % 8 == 0 and whole
    bits = _mixed(flat[:whole].view(torch.int64)) if can_be_cast else flat.new_zeros((), dtype=torch.int64)
    rest = flat[whole:] if can_be_cast else flat
    if len(rest):
        bits = bits + _mixed(rest.contiguous().view(torch.uint8).long())
    return bits


def _mixed(words: Tensor) -> Tensor:
    """Return a number for these integers that depends on their order: of the sums of rows and columns of a square."""
    width = math.isqrt(len(words))
    square, rest = words[: width * width].view(width, width), words[width * width :]
    sums = torch.cat([square.sum(0), square.sum(1), rest])
    places = torch.arange(1, len(sums) + 1, device=sums.device)
    return ((sums ^ (sums >> 29)) * (places * 0x2545F4914F6CDD1D)).sum()

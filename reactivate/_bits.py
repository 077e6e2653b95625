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
    per_word = 8 // flat.itemsize
    start = -int(flat.storage_offset()) % per_word
    stop = len(flat) - (len(flat) - start) % per_word
    if start >= stop:
        return _mixed(flat.contiguous().view(torch.uint8).long())
    bits = _mixed(flat[start:stop].view(torch.int64))
    # As bytes, since autocast looks at floats.
    rest = torch.cat([flat[:start].view(torch.uint8), flat[stop:].view(torch.uint8)])
    return bits + _mixed(rest.long()) if len(rest) else bits


def checksum_of(tensor: Tensor) -> Tensor:
    """Return the checksum of the elements of a tensor, on its device."""
    return checksum(elements_in_a_row(tensor))


def elements_in_a_row(tensor: Tensor) -> Tensor:
    """Return the elements of a tensor in one dimension, complex ones as pairs."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    dense = plain.contiguous()
    flat = dense.as_strided((dense.numel(),), (1,))  # one element alone may have any stride
    return torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat


def _mixed(words: Tensor) -> Tensor:
    """Return a number for these integers that depends on their order: of the sums of rows and columns of a rectangle.

    Rows are of odd length: a sum of integers that wrap does not see that an even number of highest bits has changed, and
    the highest bit is the sign of a number.
    """
    width = max(math.isqrt(len(words)) - 1, 0) | 1
    height = len(words) // width
    square, rest = words[: width * height].view(height, width), words[width * height :]
    sums = torch.cat([square.sum(0), square.sum(1), rest])
    places = torch.arange(1, len(sums) + 1, device=sums.device)
    mixed = sums + places * 0x1E3779B97F4A7C15  # changes of small numbers at several places must not cancel out
    mixed = (mixed ^ (mixed >> 29)) * 0x2545F4914F6CDD1D
    return (mixed ^ (mixed >> 32)).sum()

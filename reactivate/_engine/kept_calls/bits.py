"""Tensors of two values as bits: masks, and the noise that dropout multiplies by, which is zero or one number."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from reactivate._engine.aside import aside
from reactivate._engine.kept_calls.kept import Kept
from reactivate._torch.fake import FakeTensor
from reactivate._types import Storage

# A word of eight bytes that are 0 or 1, times the first, has them as the bits of its topmost byte. A byte, times the second,
# has its bits at eight places of a word, each in a byte of its own.
_GATHER, _SPREAD = 0x0102040810204080, 0x0101010101010101
_PLACES = 0x8040201008040201 - 2**64
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class _Shape(NamedTuple):
    """The shape of a tensor without gaps.

    Attributes:
        value: the number that is not zero, of no dimension; None of booleans.
    """

    size: torch.Size
    stride: tuple[int, ...]
    elements: int
    value: Tensor | None


class Bits(Kept):
    """A tensor of two values that is kept as one bit an element.

    Args:
        tensor: the tensor, one that `has_two_values`.
        is_shown: whether somebody else has it, and may write to it.
    """

    __slots__ = ("_shape", "_shown")

    def __init__(self, tensor: Tensor, storage: Storage, *, is_shown: bool = False) -> None:
        self._shape = aside(_shape_of, tensor)
        self._shown = (tensor.detach(), tensor._version) if is_shown else None
        packed: Tensor = aside(_packed, tensor)
        super().__init__(packed, packed._version, storage)

    def is_written(self) -> bool:
        return self._shown is not None and self._shown[0]._version != self._shown[1]

    def settle(self) -> None:
        self._shown = None
        super().settle()

    def load(self) -> Tensor:
        found: Tensor = aside(_unpacked, super().load(), self._shape)
        return found


def has_two_values(tensor: Tensor) -> bool:
    """Return whether a tensor can be kept as bits: a mask, or on the CPU zeros and one other number.

    On an accelerator, to look at numbers would wait for it.
    """
    kind = type(tensor)
    if (
        kind not in (Tensor, FakeTensor)
        or tensor.layout is not torch.strided
        or tensor.device.type not in ("cpu", "cuda")
    ):
        return False
    if not tensor.numel() or not _flat(tensor).is_contiguous():
        return False
    if tensor.dtype is torch.bool:
        return True
    if tensor.device.type != "cpu" or not tensor.is_floating_point():
        return False
    return kind is FakeTensor or bool(aside(_comes_back, tensor))


def _comes_back(tensor: Tensor) -> bool:
    return same_bits(tensor, _unpacked(_packed(tensor), _shape_of(tensor)))


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors of one dtype and size have the same bits."""
    dtype = _INTEGERS[one.element_size()]
    return torch.equal(one.detach().view(dtype), other.detach().view(dtype))


def _shape_of(tensor: Tensor) -> _Shape:
    value = None if tensor.dtype is torch.bool else tensor.detach().amax().clone()
    return _Shape(tensor.size(), tensor.stride(), tensor.numel(), value)


def _flat(tensor: Tensor) -> Tensor:
    """Return a view whose dimensions are in the order in which the elements lie in memory."""
    return tensor.detach().permute(sorted(range(tensor.dim()), key=lambda dim: -int(tensor.stride(dim))))


def _packed(tensor: Tensor) -> Tensor:
    bits = _flat(tensor).reshape(-1) != 0
    missing = -bits.numel() % 8
    if missing:
        bits = torch.cat([bits, bits.new_zeros(missing)])
    words = bits.view(torch.uint8).view(torch.int64)
    return ((words * _GATHER) >> 56).bitwise_and_(255).to(torch.uint8)


def _unpacked(packed: Tensor, shape: _Shape) -> Tensor:
    words = (packed.to(torch.int64) * _SPREAD).bitwise_and_(_PLACES)
    found = words.view(torch.uint8)[: shape.elements] != 0
    if shape.value is not None:
        found = found.to(shape.value.dtype).mul_(shape.value)
    return found.as_strided(shape.size, shape.stride)

"""Tensors of two values as bits: masks, and the noise that dropout multiplies by, which is zero or one number."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from reactivate._engine.aside import aside
from reactivate._engine.kept_calls.kept import Kept
from reactivate._torch.fake import FakeTensor
from reactivate._types import Storage

# A word of eight bytes that are 0 or 1, times this number, has them as the bits of its topmost byte.
_GATHER = 0x0102040810204080
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class _Shape(NamedTuple):
    """The shape of a tensor without gaps.

    Attributes:
        value: the number that is not zero, of no dimension; None of booleans.
    """

    size: torch.Size
    stride: tuple[int, ...]
    value: Tensor | None


class Bits(Kept):
    """A tensor of two values that is kept as one bit an element."""

    __slots__ = ("_shape", "_shown")

    def __init__(self, packed: Tensor, shape: _Shape, storage: Storage, shown: Tensor | None) -> None:
        super().__init__(packed, packed._version, storage)
        self._shape = shape
        self._shown = None if shown is None else (shown.detach(), shown._version)

    @classmethod
    def of(cls, tensor: Tensor, storage: Storage, *, is_shown: bool = False) -> Bits | None:
        """Return a mask, or on the CPU zeros and one other number, as bits; None if it is neither.

        On an accelerator, to look at numbers would wait for it.

        Args:
            tensor: the tensor.
            storage: where the bits are kept.
            is_shown: whether somebody else has it, and may write to it.
        """
        if not _may_have_two_values(tensor):
            return None
        packed, shape = aside(_packed, tensor)
        can_be_read = type(tensor) is Tensor and tensor.dtype is not torch.bool
        if can_be_read and not same_bits(tensor, aside(_unpacked, packed, shape)):
            return None
        return cls(packed, shape, storage, tensor if is_shown else None)

    def is_written(self) -> bool:
        return self._shown is not None and self._shown[0]._version != self._shown[1]

    def settle(self, name: str) -> None:
        self._shown = None
        super().settle(name)

    def load(self) -> Tensor:
        found: Tensor = aside(_unpacked, super().load(), self._shape)
        return found


def _may_have_two_values(tensor: Tensor) -> bool:
    if type(tensor) not in (Tensor, FakeTensor) or tensor.layout is not torch.strided or not tensor.numel():
        return False
    is_number = tensor.device.type == "cpu" and tensor.is_floating_point()
    is_mask = tensor.device.type in ("cpu", "cuda") and tensor.dtype is torch.bool
    return (is_number or is_mask) and _flat(tensor).is_contiguous()


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors of one dtype and size have the same bits."""
    dtype = _INTEGERS[one.element_size()]
    return torch.equal(one.detach().view(dtype), other.detach().view(dtype))


def _flat(tensor: Tensor) -> Tensor:
    """Return a view whose dimensions are in the order in which the elements lie in memory."""
    return tensor.detach().permute(sorted(range(tensor.dim()), key=tensor.stride().__getitem__, reverse=True))


def _packed(tensor: Tensor) -> tuple[Tensor, _Shape]:
    value = None if tensor.dtype is torch.bool else tensor.detach().amax().clone()
    shape = _Shape(tensor.size(), tensor.stride(), value)
    bits = _flat(tensor).reshape(-1) != 0
    missing = -bits.numel() % 8
    if missing:
        bits = torch.cat([bits, bits.new_zeros(missing)])
    words = bits.view(torch.uint8).view(torch.int64)
    return ((words * _GATHER) >> 56).bitwise_and_(255).to(torch.uint8), shape


def _unpacked(packed: Tensor, shape: _Shape) -> Tensor:
    codes = torch.arange(256, device=packed.device, dtype=torch.int32)
    table = (codes[:, None] >> codes[:8]).bitwise_and_(1).to(torch.bool)  # of each byte its eight bits
    if shape.value is not None:
        table = table.to(shape.value.dtype).mul_(shape.value)
    found = table.index_select(0, packed.to(torch.int32)).view(-1)
    return found.as_strided(shape.size, shape.stride)

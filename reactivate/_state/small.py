"""Small tensors in the memory of the CPU: copied byte by byte, all of them into one piece of memory.

To copy a vector of batch norm's with an op costs ten times the copying. And bytes need no version counter to be relied on:
whoever wrote to them, and however, they are compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from ctypes import memmove
from itertools import accumulate
from operator import attrgetter

import torch
from torch import Tensor
from torch.nn import Parameter

from reactivate._compat import equal_unseen, run_unseen

LARGEST_BYTES = 1 << 14
"""The number of bytes up to which a tensor is small."""

_size_of, _shape_of = attrgetter("nbytes"), attrgetter("shape")
_address_of, _is_contiguous = Tensor.data_ptr, Tensor.is_contiguous


def is_small(tensor: Tensor) -> bool:
    """Return whether a tensor is nothing but a few bytes in the memory of the CPU, one behind the other."""
    return (
        (type(tensor) is Tensor or type(tensor) is Parameter)
        and tensor.is_cpu
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and tensor.nbytes <= LARGEST_BYTES
        and bool(tensor.data_ptr())
    )


class Bytes:
    """What small tensors hold.

    Args:
        tensors: the tensors.

    Attributes:
        content: their bytes behind each other.
        sizes, shapes: of each tensor, its bytes and its shape.
    """

    __slots__ = ("content", "shapes", "sizes", "tensors")

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = tensors
        self.sizes: list[int] = list(map(_size_of, tensors))
        self.shapes: list[torch.Size] = list(map(_shape_of, tensors))
        self.content = run_unseen(_memory, sum(self.sizes))
        for _ in map(memmove, self._places(), map(_address_of, tensors), self.sizes):
            pass

    def _places(self) -> Iterable[int]:
        """Return where the bytes of each tensor begin."""
        return accumulate(self.sizes, initial=self.content.data_ptr())

    def are(self, others: Bytes) -> bool:
        """Return whether this is what the same tensors hold in `others`."""
        return self.shapes == others.shapes and equal_unseen(self.content, others.content)

    def put(self) -> None:
        """Write the bytes to the tensors, wherever their memory is by now."""
        if list(map(_shape_of, self.tensors)) == self.shapes and all(map(_is_contiguous, self.tensors)):
            for _ in map(memmove, map(_address_of, self.tensors), self._places(), self.sizes):
                pass
        else:
            run_unseen(self._copy)

    @torch.no_grad()
    def _copy(self) -> None:
        offset = 0
        for tensor, size, shape in zip(self.tensors, self.sizes, self.shapes):
            copy = self.content[offset : offset + size].clone().view(tensor.dtype).view(shape)
            (tensor if tensor.shape == shape else tensor.resize_(shape)).copy_(copy)
            offset += size


def _memory(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8)

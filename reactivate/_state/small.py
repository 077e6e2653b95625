"""Small tensors in the memory of the CPU: copied byte by byte, all of them into one piece of memory.

To copy a vector of batch norm's with an op costs ten times the copying. And bytes need no version counter to be relied on:
whoever wrote to them, and however, they are compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from ctypes import memmove, string_at
from itertools import accumulate
from operator import attrgetter

import torch
from torch import Tensor
from torch.nn import Parameter

from reactivate._torch.modes import equal_unseen, run_unseen

LARGEST_BYTES = 1 << 14
"""The number of bytes up to which a tensor is small."""

_size_of, _shape_of, _kind_of = attrgetter("nbytes"), attrgetter("shape"), attrgetter("dtype")
_address_of, _is_contiguous = Tensor.data_ptr, Tensor.is_contiguous


def has_bits(tensor: Tensor) -> bool:
    """Return whether a tensor is elements behind each other, which can be seen as bytes."""
    return tensor.layout is torch.strided and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())


def is_small(tensor: Tensor) -> bool:
    """Return whether a tensor is nothing but a few bytes in the memory of the CPU, one behind the other."""
    return (
        (type(tensor) is Tensor or type(tensor) is Parameter)
        and tensor.is_cpu
        and has_bits(tensor)
        and tensor.nbytes <= LARGEST_BYTES
        and bool(tensor.data_ptr())
    )


class Bytes:
    """What small tensors hold.

    Args:
        tensors: the tensors.

    Attributes:
        content: their elements behind each other.
        sizes, shapes, kinds: of each tensor, its bytes, its shape and its dtype. Who gives a tensor other memory may change
            all of these.
    """

    __slots__ = ("content", "kinds", "shapes", "sizes", "tensors")

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = tensors
        self.shapes: list[torch.Size] = list(map(_shape_of, tensors))
        self.kinds: list[torch.dtype] = list(map(_kind_of, tensors))
        sources, addresses = tensors, list(map(_address_of, tensors))
        if not all(map(_is_contiguous, tensors)):
            sources = run_unseen(_contiguous, tensors)
            addresses = list(map(_address_of, sources))
        self.sizes: list[int] = list(map(_size_of, sources))
        if not all(addresses):  # its memory was given back
            self.sizes = [size if address else 0 for size, address in zip(self.sizes, addresses)]
        self.content = run_unseen(_memory, sum(self.sizes))
        for _ in map(memmove, self._places(), addresses, self.sizes):
            pass

    def _places(self) -> Iterable[int]:
        """Return where the bytes of each tensor begin."""
        return accumulate(self.sizes, initial=self.content.data_ptr())

    def are(self, others: Bytes) -> bool:
        """Return whether this is what the same tensors hold in `others`."""
        return (
            self.shapes == others.shapes
            and self.kinds == others.kinds
            and self.sizes == others.sizes
            and equal_unseen(self.content, others.content)
        )

    def put(self) -> None:
        """Write to the tensors that hold something else by now, and to no other: it may be in memory for reading only."""
        now = Bytes(self.tensors)
        if not self.are(now):
            rows = zip(self.tensors, self.sizes, self._places(), now.sizes, now._places())
            for index, (tensor, size, place, size_now, place_now) in enumerate(rows):
                is_alike = self.shapes[index] == now.shapes[index] and self.kinds[index] == now.kinds[index]
                if is_alike and size == size_now and string_at(place, size) == string_at(place_now, size):
                    continue
                if is_alike and size == size_now and tensor.is_contiguous():
                    memmove(tensor.data_ptr(), place, size)
                elif size and tensor.data_ptr():
                    run_unseen(self._copy, index)

    @torch.no_grad()
    def _copy(self, index: int) -> None:
        """Write the elements of one tensor to memory of another form."""
        tensor, shape, start = self.tensors[index], self.shapes[index], sum(self.sizes[:index])
        copy = self.content[start : start + self.sizes[index]].clone().view(self.kinds[index]).view(shape)
        (tensor if tensor.shape == shape else tensor.resize_(shape)).copy_(copy)


def _memory(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8)


@torch.no_grad()
def _contiguous(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.contiguous() for tensor in tensors]

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

from reactivate._engine.state.geometry import Geometry, has_geometry, has_memory, put
from reactivate._torch.modes import equal_unseen, run_unseen

LARGEST_BYTES = 1 << 14
"""The number of bytes up to which a tensor is small."""

_size_of, _shape_of, _kind_of = attrgetter("nbytes"), attrgetter("shape"), attrgetter("dtype")
_address_of, _strides_of, _is_contiguous = Tensor.data_ptr, Tensor.stride, Tensor.is_contiguous


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
        and not tensor.is_nested
        and has_memory(tensor)
    )


class Bytes:
    """The contents of small tensors.

    Args:
        tensors: the tensors.

    Attributes:
        content: their elements behind each other.
        sizes, shapes, kinds, addresses: of each tensor, its bytes, shape, dtype, and where it begins. Code that gives a
            tensor other memory may change all of these.
        strides: None if the elements of every tensor are behind each other.
        memory: {index: an alias} of those whose memory is to be given back to them; see `keep_memory`.
    """

    __slots__ = ("addresses", "content", "kinds", "memory", "shapes", "sizes", "strides", "tensors")

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = tensors
        self.shapes: list[torch.Size] = list(map(_shape_of, tensors))
        self.kinds: list[torch.dtype] = list(map(_kind_of, tensors))
        self.addresses: list[int] = list(map(_address_of, tensors))
        self.strides: list[tuple[int, ...]] | None = None
        self.memory: dict[int, Tensor] = {}
        sources, addresses = tensors, self.addresses
        if not all(map(_is_contiguous, tensors)):
            self.strides = list(map(_strides_of, tensors))
            sources = run_unseen(_contiguous, tensors)
            addresses = list(map(_address_of, sources))
        self.sizes: list[int] = list(map(_size_of, sources))
        if not all(addresses):  # its memory was given back, or it has no elements
            self.sizes = [size if address else 0 for size, address in zip(self.sizes, addresses)]
        self.content = run_unseen(_memory, sum(self.sizes))
        for _ in map(memmove, self._places(), addresses, self.sizes):
            pass

    def _places(self) -> Iterable[int]:
        """Return where the bytes of each tensor begin."""
        return accumulate(self.sizes, initial=self.content.data_ptr())

    def are(self, others: Bytes) -> bool:
        """Return whether this is what the same tensors hold in `others`, in the same places."""
        return (
            self.addresses == others.addresses
            and self.shapes == others.shapes
            and self.kinds == others.kinds
            and self.sizes == others.sizes
            and self.strides == others.strides
            and equal_unseen(self.content, others.content)
        )

    def keep_memory(self, others: Bytes) -> None:
        """Keep the memory of tensors that are in other places in `others`, which are put next."""
        for index in self._moved(others):
            tensor = self.tensors[index]
            if has_geometry(tensor):
                self.memory[index] = run_unseen(Tensor.detach, tensor)

    def _moved(self, others: Bytes) -> Sequence[int]:
        """Return which tensors are in other places in `others`, or have elements that are not behind each other."""
        has_strides = self.strides is not None or others.strides is not None
        are_alike = self.shapes == others.shapes and self.kinds == others.kinds
        if are_alike and not has_strides and self.addresses == others.addresses:
            return ()
        one, other = (list(zip(item.addresses, item.shapes, item.kinds)) for item in (self, others))
        return [index for index, where in enumerate(one) if has_strides or where != other[index]]

    def put(self) -> None:
        """Write to the tensors that hold something else by now, and to no other: it may be in memory for reading only."""
        now = Bytes(self.tensors)
        if not self.are(now):
            moved = self._moved(now)
            rows = zip(self.tensors, self.sizes, self._places(), now._places())
            for index, (tensor, size, place, place_now) in enumerate(rows):
                if index in moved:
                    run_unseen(self._put_elsewhere, index)
                elif string_at(place, size) != string_at(place_now, size):
                    memmove(tensor.data_ptr(), place, size)

    @torch.no_grad()
    def _put_elsewhere(self, index: int) -> None:
        """Write the elements of one tensor, which may have other memory or another form by now."""
        tensor, shape, start = self.tensors[index], self.shapes[index], sum(self.sizes[:index])
        content = self.content[start : start + self.sizes[index]].clone().view(self.kinds[index])
        if has_geometry(tensor):
            content = content.view(shape) if content.numel() == shape.numel() else content
            strides = content.stride() if self.strides is None else self.strides[index]
            noted = Geometry(self.addresses[index], shape, strides, self.kinds[index])
            put(tensor, noted, content, self.memory.get(index))
        elif self.sizes[index] and tensor.data_ptr():
            (tensor if tensor.shape == shape else tensor.resize_(shape)).copy_(content.view(shape))


def _memory(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8)


@torch.no_grad()
def _contiguous(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.contiguous() for tensor in tensors]

"""Small tensors in the memory of the CPU: copied byte by byte, all of them into one piece of memory.

To copy a vector of batch norm's with an op costs ten times the copying. And bytes need no version counter to be relied on:
whoever wrote to them, and however, they are compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_char, memmove, string_at
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from reactivate._engine.state.bounded import cached
from reactivate._engine.state.geometry import Geometry, has_geometry, has_memory, put
from reactivate._torch.modes import run_unseen

LARGEST_BYTES = 1 << 14
"""The number of bytes up to which a tensor is small."""

_form_of, _raw = attrgetter("nbytes", "shape", "dtype"), attrgetter("raw")
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
        is_kept: whether this is kept until the backward: then it is in a tensor, whose memory torch's profilers count.

    Attributes:
        kept: that tensor.
        forms, addresses: (bytes, shape, dtype) of each tensor, and where it begins. Code that gives a tensor other memory
            may change all of these.
        sizes: how many bytes of each tensor there are in the contents.
        strides: None if the elements of every tensor are behind each other.
        memory: {index: an alias} of those whose memory is to be given back to them; see `keep_memory`.
    """

    __slots__ = ("_content", "addresses", "forms", "kept", "memory", "sizes", "strides", "tensors")

    def __init__(self, tensors: Sequence[Tensor], *, is_kept: bool = False) -> None:
        self.tensors = tensors
        self.forms: list[tuple[int, torch.Size, torch.dtype]] = list(map(_form_of, tensors))
        self.addresses: list[int] = list(map(_address_of, tensors))
        self.strides: list[tuple[int, ...]] | None = None
        self.memory: dict[int, Tensor] = {}
        sources, addresses = tensors, self.addresses
        self.sizes: list[int] = [size for size, *_ in self.forms]
        if not all(map(_is_contiguous, tensors)):
            self.strides = list(map(_strides_of, tensors))
            sources = run_unseen(_contiguous, tensors)
            addresses = list(map(_address_of, sources))
        if not all(addresses):  # its memory was given back, or it has no elements
            self.sizes = [size if address else 0 for size, address in zip(self.sizes, addresses)]
        self._content = b"".join(map(_raw, map(_memory_at, addresses, self.sizes)))
        self.kept: Tensor | None = None
        if is_kept:
            size = len(self._content)
            self.kept = run_unseen(_memory, size)
            memmove(self.kept.data_ptr(), self._content, size)
            self._content = b""

    def content(self) -> bytes:
        """Return the elements of the tensors, behind each other."""
        return self._content if self.kept is None else string_at(self.kept.data_ptr(), self.kept.nbytes)

    def are(self, others: Bytes) -> bool:
        """Return whether this is what the same tensors hold in `others`, in the same places."""
        return (
            self.content() == others.content()
            and self.addresses == others.addresses
            and self.forms == others.forms
            and self.sizes == others.sizes
            and self.strides == others.strides
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
        if not has_strides and self.forms == others.forms and self.addresses == others.addresses:
            return ()
        one, other = (list(zip(item.addresses, item.forms)) for item in (self, others))
        return [index for index, where in enumerate(one) if has_strides or where != other[index]]

    def put(self, now: Bytes) -> None:
        """Write to the tensors that hold something else by now, and to no other: it may be in memory for reading only.

        Args:
            now: what they hold.
        """
        if not self.are(now):
            moved, content, content_now = self._moved(now), self.content(), now.content()
            start = start_now = 0
            for index, (size, size_now) in enumerate(zip(self.sizes, now.sizes)):
                part = content[start : start + size]
                if index in moved:
                    run_unseen(self._put_elsewhere, index, part)
                elif part != content_now[start_now : start_now + size_now]:
                    memmove(self.tensors[index].data_ptr(), part, size)
                start, start_now = start + size, start_now + size_now

    @torch.no_grad()
    def _put_elsewhere(self, index: int, part: bytes) -> None:
        """Write the elements of one tensor, which may have other memory or another form by now."""
        tensor, (_, shape, kind) = self.tensors[index], self.forms[index]
        content = _memory(len(part))
        memmove(content.data_ptr(), part, len(part))
        content = content.view(kind)
        if has_geometry(tensor):
            content = content.view(shape) if content.numel() == shape.numel() else content
            strides = content.stride() if self.strides is None else self.strides[index]
            put(tensor, Geometry(self.addresses[index], shape, strides, kind), content, self.memory.get(index))
        elif part and tensor.data_ptr():
            (tensor if tensor.shape == shape else tensor.resize_(shape)).copy_(content.view(shape))


@cached
def _memory_at(address: int, size: int) -> Any:
    """Return an object for the bytes that are in memory there, which holds nothing: to make one costs more than to read."""
    return (c_char * size).from_address(address)


def _memory(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8)


@torch.no_grad()
def _contiguous(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.contiguous() for tensor in tensors]

"""Small tensors in the memory of the CPU: copied byte by byte, all of them into one piece of memory.

To copy a vector of batch norm's with an op costs ten times the copying. And bytes need no version counter to be relied on:
whatever wrote to them, and however, they are compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from ctypes import c_char, memmove
from operator import attrgetter
from struct import Struct
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.nn import Parameter

from reactivate._snapshot.geometry import Geometry, has_geometry, has_memory, put
from reactivate._torch.modes import run_unseen

LARGEST_BYTES = 1 << 14
"""The number of bytes up to which a tensor is small."""

_Layout = tuple[tuple[int, ...], bool, bool]
KINDS = frozenset({Tensor, Parameter})
_form_of, _size_of = attrgetter("shape", "dtype"), attrgetter("nbytes")
_address_of = Tensor.data_ptr
_is_contiguous, _is_conj, _is_negated = Tensor.is_contiguous, Tensor.is_conj, Tensor.is_neg


def has_bits(tensor: Tensor) -> bool:
    """Return whether a tensor is elements behind each other, which can be seen as bytes."""
    return tensor.layout is torch.strided and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())


def is_small(tensor: Tensor) -> bool:
    """Return whether a tensor is nothing but a few bytes in the memory of the CPU, one behind the other."""
    return (
        type(tensor) in KINDS
        and tensor.is_cpu
        and has_bits(tensor)
        and tensor.nbytes <= LARGEST_BYTES
        and not tensor.is_nested
        and has_memory(tensor)
    )


class Whereabouts:
    """The addresses and forms of some small tensors. Code that gives a tensor other memory may change all of this.

    Copies of the same tensors in the same places share one object.

    Attributes:
        addresses: where each tensor begins.
        forms: (shape, dtype) of each.
        sizes: how many bytes of each there are in a copy.
        layouts: (strides, lazy bits) of each; None if every tensor is its elements, one behind the other.
        pieces: objects for the bytes of each, which hold nothing; None unless all are elements behind each other.
        split: takes the bytes of a copy apart, where there are pieces.
        storages: held, so that no other memory gets an address of `addresses`.
        is_simple: whether the elements of every tensor are behind each other, none is complex, and each has some.
    """

    __slots__ = ("addresses", "forms", "is_simple", "layouts", "pieces", "sizes", "split", "storages")

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.addresses, self.forms = list(map(_address_of, tensors)), list(map(_form_of, tensors))
        self.storages = run_unseen(_storages_of, tensors)
        self.sizes: list[int] = list(map(_size_of, tensors))
        self.layouts: list[_Layout] | None = None
        self.pieces: list[Any] | None = None
        if not all(map(_is_contiguous, tensors)) or any(map(_is_conj, tensors)) or any(map(_is_negated, tensors)):
            self.layouts = [(tensor.stride(), tensor.is_conj(), tensor.is_neg()) for tensor in tensors]
        elif all(self.addresses):
            self.pieces = _pieces_of(self.addresses, self.sizes)
            self.split = Struct("".join(f"{size}s" for size in self.sizes)).unpack
        self.is_simple = self.pieces is not None and not any(kind.is_complex for _, kind in self.forms)

    def read_again(self, tensors: Sequence[Tensor]) -> bytes | None:
        """Do as `read`, with tensors that may be in other places by now; None unless these lie as those did, in pieces."""
        if (
            self.pieces is not None
            and list(map(_address_of, tensors)) == self.addresses
            and list(map(_form_of, tensors)) == self.forms
            and all(map(_is_contiguous, tensors))
            and not any(map(_is_negated, tensors))
            and (self.is_simple or not any(map(_is_conj, tensors)))
        ):
            return b"".join(self.pieces)
        return None

    def read(self, tensors: Sequence[Tensor]) -> bytes:
        """Return the elements of the tensors, which are in these places, behind each other."""
        if self.pieces is not None:
            return b"".join(self.pieces)
        sources = tensors if self.layouts is None else run_unseen(_elements_of, tensors)
        addresses = list(map(_address_of, sources))  # 0: its memory was given back, or it has no elements
        self.sizes = [size if address else 0 for size, address in zip(self.sizes, addresses)]
        return b"".join(_pieces_of(addresses, self.sizes))

    def are(self, others: Whereabouts) -> bool:
        """Return whether these are the same places."""
        return self is others or (
            self.addresses == others.addresses
            and self.forms == others.forms
            and self.sizes == others.sizes
            and self.layouts == others.layouts
        )


def _pieces_of(addresses: Sequence[int], sizes: Sequence[int]) -> list[Any]:
    """Return objects for the bytes that are in memory there, which hold nothing."""
    return [(c_char * size).from_address(address) for address, size in zip(addresses, sizes)]


class SmallCopy:
    """The contents of small tensors.

    Args:
        tensors: the tensors.
        last: where they were at the last look, if that is known.
        is_kept: whether this is kept until the backward: then it is in a storage, whose memory torch's profilers count.

    Attributes:
        kept: that storage.
        places: where the tensors are.
        memory: {index: an alias} of those whose memory is to be given back to them; see `keep_memory`.
    """

    kept: UntypedStorage | None = None
    memory: Mapping[int, Tensor] = MappingProxyType({})
    _content = b""

    def __init__(self, tensors: Sequence[Tensor], last: Whereabouts | None = None, *, is_kept: bool = False) -> None:
        self.tensors = tensors
        if last is None or (content := last.read_again(tensors)) is None:
            last = Whereabouts(tensors)
            content = last.read(tensors)
        self.places = last
        if is_kept:
            self.kept = kept = UntypedStorage(len(content))
            self._bytes_kept = (c_char * len(content)).from_address(kept.data_ptr())
            self._bytes_kept.raw = content
        else:
            self._content = content

    def content(self) -> bytes:
        """Return the elements of the tensors, behind each other."""
        return self._content if self.kept is None else self._bytes_kept.raw

    def are(self, others: SmallCopy) -> bool:
        """Return whether this is what the same tensors hold in `others`, in the same places."""
        return self.content() == others.content() and self.places.are(others.places)

    def keep_memory(self, others: SmallCopy) -> None:
        """Keep the memory of tensors that are in other places in `others`, which are put next."""
        for index in self._moved(others):
            tensor = self.tensors[index]
            if has_geometry(tensor):
                self.memory = {**self.memory, index: run_unseen(Tensor.detach, tensor)}

    def _moved(self, others: SmallCopy) -> Sequence[int]:
        """Return which tensors are in other places in `others`, or have elements that are not behind each other."""
        if self.places is others.places and self.places.layouts is None:
            return ()
        are_odd = self.places.layouts is not None or others.places.layouts is not None
        one, other = (list(zip(item.places.addresses, item.places.forms)) for item in (self, others))
        return [index for index, where in enumerate(one) if are_odd or where != other[index]]

    def put(self, now: SmallCopy) -> None:
        """Write to the tensors that hold something else by now, and to no other: it may be in memory for reading only.

        Args:
            now: what they hold.
        """
        content, content_now = self.content(), now.content()
        places = self.places
        if places is now.places and places.pieces is not None:
            if content != content_now:
                for piece, part, part_now in zip(places.pieces, places.split(content), places.split(content_now)):
                    if part != part_now:
                        piece.raw = part
        elif content != content_now or not places.are(now.places):
            moved = self._moved(now)
            start = start_now = 0
            for index, (size, size_now) in enumerate(zip(self.places.sizes, now.places.sizes)):
                part = content[start : start + size]
                if index in moved:
                    run_unseen(self._put_elsewhere, index, part)
                elif part != content_now[start_now : start_now + size_now]:
                    memmove(self.tensors[index].data_ptr(), part, size)
                start, start_now = start + size, start_now + size_now

    @torch.no_grad()
    def _put_elsewhere(self, index: int, part: bytes) -> None:
        """Write the elements of one tensor, which may have other memory or another form by now."""
        tensor, places = self.tensors[index], self.places
        shape, kind = places.forms[index]
        content = torch.empty(len(part), dtype=torch.uint8)
        memmove(content.data_ptr(), part, len(part))
        content = content.view(kind)
        if has_geometry(tensor):
            content = content.view(shape) if content.numel() == shape.numel() else content
            layout = (content.stride(), False, False) if places.layouts is None else places.layouts[index]
            strides, *lazy = layout
            put(tensor, Geometry(places.addresses[index], shape, strides, kind, *lazy), content, self.memory.get(index))
        elif part and tensor.data_ptr():
            (tensor if tensor.shape == shape else tensor.resize_(shape)).copy_(content.view(shape))


def _storages_of(tensors: Sequence[Tensor]) -> list[UntypedStorage]:
    return list(map(Tensor.untyped_storage, tensors))


@torch.no_grad()
def _elements_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.resolve_conj().resolve_neg().contiguous() for tensor in tensors]

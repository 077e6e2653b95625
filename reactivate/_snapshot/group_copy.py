"""Tensors of one kind, copied with one op: vectors that are written to without a new version, and too large for `small`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from reactivate._snapshot import geometry
from reactivate._snapshot.geometry import Geometry, elements_of, geometry_of, has_memory
from reactivate._snapshot.small_copy import has_bits
from reactivate._torch.modes import copy_all, is_dispatch_mode_active, is_function_mode_active, run_unseen

_ndim_of, _shape_of, _dtype_of = map(attrgetter, ("ndim", "shape", "dtype"))


class GroupCopy:
    """The contents of some tensors.

    Args:
        tensors: one tensor, or vectors of one dtype on one device.
        contents: a copy of each, if there are copies.

    Attributes:
        contents: a copy of each, or one of all of them behind each other.
        geometries: where their elements were; None of a tensor that has no geometry that can be put back.
        memory: {index: an alias} of those whose memory is to be given back to them; see `keep_memory`.
    """

    __slots__ = ("contents", "geometries", "memory", "tensors")

    def __init__(self, tensors: Sequence[Tensor], contents: Sequence[Tensor] | None = None) -> None:
        self.tensors = tensors
        self.contents = _copies_of(tensors) if contents is None else contents
        self.geometries: Sequence[Any] = _geometries_of(tensors)
        self.memory: dict[int, Tensor] = {}

    def are(self, other: GroupCopy) -> bool:
        """Return whether `other` is known to hold the same; on an accelerator to ask would be to wait."""
        return (
            self.geometries == other.geometries
            and len(self.contents) == len(other.contents)
            and all(map(_is_equal, self.contents, other.contents))
        )

    def keep_memory(self, other: GroupCopy) -> None:
        """Keep the memory of tensors that have another geometry in `other`, which is put next."""
        for index, tensor in enumerate(self.tensors):
            if self.geometries[index] != other.geometries[index]:
                self.memory[index] = tensor.detach()

    def put(self) -> None:
        """Let the tensors hold this; gradients are off."""
        tensors, contents = self.tensors, self.contents
        if len(contents) < len(tensors):
            contents = contents[0].split([shape[0] for _, shape, *_ in self.geometries])
            if _geometries_of(tensors) == self.geometries:
                copy_all(tensors, list(contents))
                return
        for index, (tensor, content) in enumerate(zip(tensors, contents)):
            put(tensor, content, self.geometries[index], self.memory.get(index))


def _geometries_of(tensors: Sequence[Tensor]) -> list[Any]:
    """Return a `Geometry`, or its items, of each tensor."""
    if len(tensors) == 1:
        return [geometry_of(tensors[0])]
    addresses, shapes, strides = map(Tensor.data_ptr, tensors), map(_shape_of, tensors), map(Tensor.stride, tensors)
    lazy = map(Tensor.is_conj, tensors), map(Tensor.is_neg, tensors)
    return list(zip(addresses, shapes, strides, map(_dtype_of, tensors), *lazy))


def put(tensor: Tensor, content: Tensor, noted: Any, memory: Tensor | None = None) -> None:
    """Let a tensor hold a copy, in the geometry that it had; gradients are off."""
    if noted is not None and geometry_of(tensor) != noted:
        geometry.put(tensor, Geometry(*noted), content, memory)
    elif tensor.is_inference() or tensor.is_nested:
        with torch.inference_mode(tensor.is_inference()), torch.no_grad():
            tensor.copy_(content)
    elif tensor.shape != content.shape:
        tensor.resize_(content.shape).copy_(content)
    elif tensor.layout is torch.strided and tensor.numel() > 1 and 0 in tensor.stride():
        geometry.write(tensor, content)
    elif noted is None or noted[0] or not tensor.numel():  # otherwise its memory was given back
        tensor.copy_(content)


def grouped(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Return the tensors in groups of one kind: dtype, device."""
    groups: dict[Any, list[Tensor]] = {}
    for tensor in tensors:
        is_vector = tensor.ndim == 1 and is_plain(tensor) and not tensor.is_inference()
        is_vector = is_vector and (tensor.is_cpu or tensor.is_cuda)
        key = (tensor.dtype, tensor.device) if is_vector else id(tensor)
        groups.setdefault(key, []).append(tensor)
    return list(groups.values())


def _copies_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    are_seen = is_dispatch_mode_active() or is_function_mode_active()
    if len(tensors) == 1 or are_seen or set(map(_ndim_of, tensors)) != {1} or not all(map(has_memory, tensors)):
        return list(map(elements_of, tensors))
    return [torch.cat(list(tensors))]


def is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor is nothing but elements behind each other."""
    return type(tensor) is Tensor and has_bits(tensor) and not tensor.is_nested


def _is_equal(one: Tensor, other: Tensor) -> bool:
    return one.is_cpu and is_plain(one) and is_plain(other) and run_unseen(torch.equal, bits_of(one), bits_of(other))


def bits_of(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor that `is_plain`."""
    return tensor.contiguous().view(torch.uint8) if tensor.ndim else tensor.reshape(1).view(torch.uint8)

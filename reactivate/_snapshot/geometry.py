"""The memory that a tensor has, and how its elements lie there and are read: shape, strides, dtype, lazy bits.

`t_()`, `resize_`, `set_` and `tensor.data = other` change these in place. A recomputation needs them as they were: in the
memory that the tensor has now if that is the old one, so that aliases see what is written, and otherwise in memory of its
own. The present memory may belong to something else, to a parameter for example, and is not written to then.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter, UninitializedBuffer, UninitializedParameter

from reactivate._snapshot.caches import WeakIdentitySet
from reactivate._torch.autograd import negated_view
from reactivate._torch.modes import copy_unseen, is_function_mode_active, without_function_modes
from reactivate._torch.modules import has_memory as has_memory_of_class

_STRIDED = torch.strided
_is_of_xla = attrgetter("is_xla")  # of each tensor; `device.type` would cost ten times as much


def memory_of(tensor: Tensor) -> int | None:
    """Return what tensors have in common that share memory, None where that cannot be told."""
    kind = type(tensor)
    if kind is Tensor and tensor.is_cpu and tensor.layout is _STRIDED:  # as mostly
        return tensor.untyped_storage()._cdata  # type: ignore[no-any-return]
    if kind not in _PLAIN and (kind in _EMPTY or not has_memory_of_class(kind)):
        return None
    if tensor.layout is not _STRIDED or tensor.is_meta or _is_of_xla(tensor):
        return None
    return tensor.untyped_storage()._cdata  # type: ignore[no-any-return]


_EMPTY = frozenset({UninitializedParameter, UninitializedBuffer})
_PLAIN = frozenset({Tensor, Parameter})
moved = WeakIdentitySet()
"""Parameters that some forward gave other memory (`parameter.data = other`)."""


class Geometry(NamedTuple):
    """The geometry of a tensor: where its elements are.

    Attributes:
        address: of the first element; 0 if there is none, or if the memory was given back.
        shape, strides, dtype: as of the tensor.
        is_conj, is_neg: whether what is read are the conjugates of the elements, or their negatives.
    """

    address: int
    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    is_conj: bool
    is_neg: bool

    @property
    def is_given_back(self) -> bool:
        """Return whether the tensor has elements and no memory for them, as sharded ones between two uses."""
        return not self.address and self.shape.numel() > 0

    def is_of(self, tensor: Tensor) -> bool:
        """Return whether `tensor`, which had it once, still has it."""
        return (
            tensor.data_ptr() == self.address
            and tensor.shape == self.shape
            and tensor.stride() == self.strides
            and tensor.dtype is self.dtype
            and tensor.is_conj() is self.is_conj
            and tensor.is_neg() is self.is_neg
        )


def has_geometry(tensor: Tensor) -> bool:
    """Return whether a tensor has a geometry that can be put back.

    Parameters are left to sharding libraries, which move them as they need them, but for those that a forward has moved.
    """
    return (
        (type(tensor) is Tensor or moved.has(tensor))
        and tensor.layout is torch.strided
        and (tensor.is_cpu or tensor.is_cuda)
        and not tensor.is_nested
    )


def is_moved(tensor: Tensor, address: int) -> bool:
    """Return whether some forward has moved a parameter, and it is elsewhere than at this address by now."""
    return bool(address) and moved.has(tensor) and _address_of(tensor) not in (0, address)


def kept_elsewhere(tensors: Sequence[Tensor], addresses: Sequence[int]) -> Sequence[tuple[Tensor, Tensor]]:
    """Return the parameters that have other memory than at these addresses, each with an alias that keeps it.

    So do those that a sharding library has gathered since.
    """
    return [
        (tensor, tensor.detach())
        for tensor, before, address in zip(tensors, addresses, addresses_of(tensors))
        if address and address != before
    ]


@torch.no_grad()
def give_memory_back(kept: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Give parameters the memory that `kept_elsewhere` has kept, if they have lost it, and if that was not freed."""
    for tensor, memory in kept:
        if memory.data_ptr() and tensor.data_ptr() != memory.data_ptr():
            tensor.data = memory


def addresses_of(tensors: Sequence[Tensor]) -> list[int]:
    """Return where the elements of each parameter begin; 0 where that says nothing, as of sharded, sparse and fake ones."""
    if is_function_mode_active():
        with without_function_modes():  # one may watch for reads of what a region around this one must not read
            return addresses_of(tensors)
    if _PLAIN.issuperset(map(type, tensors)):
        try:
            return list(map(Tensor.data_ptr, tensors))
        except RuntimeError:  # one has no memory of its own
            pass
    return list(map(_address_of, tensors))


def _address_of(tensor: Tensor) -> int:
    is_plain = type(tensor) in _PLAIN and tensor.layout is torch.strided and (tensor.is_cpu or tensor.is_cuda)
    return tensor.data_ptr() if is_plain else 0


def geometry_of(tensor: Tensor) -> Geometry | None:
    """Return the geometry of a tensor, None if it has none that can be put back."""
    if not has_geometry(tensor):
        return None
    return Geometry(tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.is_conj(), tensor.is_neg())


def has_memory(tensor: Tensor) -> bool:
    """Return whether there is memory for the elements of a tensor: not if that was given back."""
    return bool(tensor.data_ptr() or not tensor.numel())


def elements_of(tensor: Tensor) -> Tensor:
    """Return a copy of the elements of a tensor; if its memory was given back, something that stands for them."""
    if has_geometry(tensor) and not has_memory(tensor):
        return torch.empty_like(tensor)
    return copy_unseen(tensor)


def put(tensor: Tensor, geometry: Geometry, content: Tensor, memory: Tensor | None = None) -> None:
    """Give `tensor` this geometry and content; gradients are off.

    Args:
        tensor: the tensor.
        geometry: the geometry.
        content: the elements, in the shape of `geometry`; not read if its memory was given back.
        memory: an alias with this geometry, if one was kept.
    """
    now = geometry_of(tensor)
    if now is None or (memory is None and (now.is_given_back or geometry.is_given_back)):
        return
    if now != geometry:
        if memory is None:
            memory = _view_in(tensor, geometry)
        if memory is None:
            memory = torch.empty_strided(geometry.shape, geometry.strides, dtype=geometry.dtype, device=content.device)
            memory = memory.conj() if geometry.is_conj else memory
        with torch.inference_mode(tensor.is_inference()):
            tensor.data = memory
    if not geometry.is_given_back:
        write(tensor, content)


def _view_in(tensor: Tensor, geometry: Geometry) -> Tensor | None:
    """Return an alias with this geometry in the memory that `tensor` has, None if that is other memory."""
    if tensor.dtype != geometry.dtype:
        return None
    storage, size = tensor.untyped_storage(), tensor.element_size()
    shape, strides = geometry.shape, geometry.strides
    alias: Tensor | None = tensor.detach() if tensor.is_conj() == geometry.is_conj else tensor.detach().conj()
    if alias is not None and alias.is_neg() != geometry.is_neg:
        alias = negated_view(alias)
    if alias is None:
        return None
    if not shape.numel():
        return alias.as_strided(shape, strides, 0)
    offset, odd = divmod(geometry.address - storage.data_ptr(), size)
    last = offset + sum((length - 1) * stride for length, stride in zip(shape, strides))
    if odd or offset < 0 or (last + 1) * size > storage.nbytes():
        return None
    return alias.as_strided(shape, strides, offset)


def write(tensor: Tensor, content: Tensor) -> None:
    """Write `content` to the elements of `tensor`, unless it holds that: its memory may be for reading only."""
    target, source = distinct(tensor, tensor), distinct(content, tensor)
    if tensor.is_cpu and _bits(target).equal(_bits(source)):
        return
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        target.copy_(source)


def distinct(tensor: Tensor, expanded: Tensor) -> Tensor:
    """Return the elements of `tensor`, each once: those that `expanded` repeats are one element."""
    for dimension, stride in enumerate(expanded.stride()):
        if stride == 0 and tensor.size(dimension) > 1:
            tensor = tensor.narrow(dimension, 0, 1)
    return tensor


def _bits(tensor: Tensor) -> Tensor:
    elements = tensor.resolve_conj().resolve_neg().contiguous()
    return elements.as_strided((elements.numel(),), (1,)).view(torch.uint8)

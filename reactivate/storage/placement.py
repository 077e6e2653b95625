"""Placement of a tensor in memory: the run of elements that it spans, and how to see it there again.

A storage that moves bytes takes the run, which is one-dimensional and dense, to wherever it keeps it. What comes back is
another run, and `Placement.view_of` makes the tensor of it, with the strides that it had. Two tensors that are views of one
memory have two placements in one run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from reactivate._bits import checksum
from reactivate._torch.modes import FakeTensor
from reactivate._torch.modules import has_memory


@dataclass(frozen=True)
class Placement:
    """The place of a tensor in a run of elements.

    Attributes:
        size, stride: as of the tensor, in elements.
        offset: where it begins in the run, in elements.
        is_conj: whether it is a lazy conjugate.
        kind: the class of the tensor, if that is a plain subclass of `Tensor`.
        attributes: what was set on the tensor in Python.
    """

    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    is_conj: bool
    kind: type[Tensor]
    attributes: dict[str, Any]

    def view_of(self, run: Tensor) -> Tensor:
        """Return the tensor, on the memory of `run`."""
        tensor = run.as_strided(self.size, self.stride, self.offset + int(run.storage_offset()))
        if self.is_conj:
            tensor = tensor.conj()
        if self.kind is not Tensor:
            tensor = tensor.as_subclass(self.kind)
        if self.attributes:
            vars(tensor).update(self.attributes)
        return tensor

    def moved_by(self, elements: int) -> Placement:
        """Return the place in a run that begins so many elements earlier."""
        return replace(self, offset=self.offset + elements) if elements else self


@dataclass(frozen=True)
class Extent:
    """The elements of a memory that a tensor spans.

    Attributes:
        start, stop: in elements of its dtype, from the beginning of the memory.
    """

    start: int
    stop: int

    def holds(self, other: Extent) -> bool:
        """Return whether `other` is a part of it."""
        return self.start <= other.start and other.stop <= self.stop

    def is_in(self, tensor: Tensor) -> bool:
        """Return whether the memory of `tensor` is large enough: `tensor.data = other` gives it another one."""
        return self.stop * tensor.element_size() <= int(tensor.untyped_storage().nbytes())


def extent_of(tensor: Tensor) -> Extent:
    """Return the elements that `tensor` spans; all of its memory, where that is at most twice as much.

    So tensors that are views of one memory mostly are in one run, and a batch that is cut from a data set is not the whole
    of it.
    """
    start = int(tensor.storage_offset())
    if tensor.numel() == 0:
        return Extent(start, start)
    stop = start + 1 + sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride()))
    whole = int(tensor.untyped_storage().nbytes()) // tensor.element_size()
    return Extent(0, whole) if whole <= 2 * (stop - start) else Extent(start, stop)


def placement_of(tensor: Tensor) -> tuple[Placement, Extent]:
    """Return how `tensor` lies in the elements that it spans, and which these are."""
    extent = extent_of(tensor)
    offset = int(tensor.storage_offset()) - extent.start
    kind, attributes = (type(tensor), dict(vars(tensor))) if has_memory(type(tensor)) else (Tensor, {})
    return Placement(tensor.size(), tensor.stride(), offset, bool(tensor.is_conj()), kind, attributes), extent


def run_of(tensor: Tensor, extent: Extent) -> Tensor:
    """Return the elements of `extent` in the memory of `tensor`, dense and one-dimensional."""
    plain = tensor.detach()
    if type(plain) is not Tensor and has_memory(type(plain)):  # a class that is only a Python name for it
        plain = plain.as_subclass(Tensor)
    if plain.is_conj():
        plain = plain.conj()
    return plain.as_strided((extent.stop - extent.start,), (1,), extent.start)


class Memory:
    """The contents of a tensor's memory at a time, told apart from what was in it before and after.

    A version counter does not see every write: not one through `tensor.data` or NumPy, and that of a part not one through
    its wrapper. So contents are the same only if a checksum says so as well.

    Args:
        tensor: whose memory it is.
        run: the elements of it that are taken in.
        wrappers: those that the tensor is a part of.

    Attributes:
        version: of the tensor.
        nbytes: of the run.
        checksum: of the bits of the run.
    """

    __slots__ = ("_owner", "_wrappers", "checksum", "nbytes", "version")

    def __init__(self, tensor: Tensor, run: Tensor, wrappers: Sequence[Tensor] = ()) -> None:
        self._owner = ref(owner_of(tensor))
        self.version = tensor._version
        self.nbytes = run.nbytes
        self.checksum = _checksum_of(run)
        self._wrappers = [(wrapper.detach(), wrapper._version) for wrapper in wrappers]

    def is_of(self, tensor: Tensor) -> bool:
        """Return whether it is that of `tensor`, and no version counter has seen a write since."""
        return self._owner() is owner_of(tensor) and tensor._version == self.version

    def has_bits_of(self, run: Tensor) -> bool:
        """Return whether the contents are those that the same run has now. A device is waited for."""
        return isinstance(run, FakeTensor) or bool(_checksum_of(run) == self.checksum)

    def is_written(self, run: Tensor) -> bool:
        """Return whether a version counter has seen a write to the run that was taken in."""
        return run._version != self.version or any(alias._version != version for alias, version in self._wrappers)

    def let_go(self) -> None:
        """Hold no wrapper any more: the run is elsewhere."""
        self._wrappers.clear()


def _checksum_of(run: Tensor) -> Any:
    """Return a number: in memory of its own on a device, which is not waited for here, and as large for a fake run."""
    if isinstance(run, FakeTensor):
        return run.new_empty((), dtype=torch.int64) if run.device.type != "cpu" else None
    found = checksum(run.view(torch.uint8))
    return int(found) if run.device.type == "cpu" else found


def owner_of(tensor: Tensor) -> Tensor:
    """Return the tensor whose views share memory and version counter with `tensor`: itself, if it is no view."""
    return tensor if tensor._base is None else tensor._base

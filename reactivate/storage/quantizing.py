"""The part of a storage that writes tensors with fewer bits, and hands the codes to another storage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from reactivate._types import Storage
from reactivate.storage.codec import DTYPES, Codec, Coded
from reactivate.storage.compact import Compact
from reactivate.storage.moved import Moved, Mover
from reactivate.storage.pieces import Piece
from reactivate.storage.placement import Extent, Memory, owner_of, placement_of
from reactivate.storage.wrapped import parts_of

OTHER_DTYPES = "no floating point numbers of 16 bits or more"


@dataclass(frozen=True, eq=False)
class KeptExactly:
    """The handle of a tensor that the other storage keeps as it is."""

    handle: Any


class CodedPiece(Piece):
    """A tensor that is kept in codes.

    Attributes:
        geometry: offset, sizes and strides of the tensor, and whether it is lazily negative.
    """

    def __init__(
        self, memory: Memory, geometry: Any, way: Compact, elements: Tensor, codec: Codec, inner: Storage
    ) -> None:
        super().__init__(memory, Extent(0, way.span))
        self.geometry = geometry
        self._way = way
        self._codec = codec
        self._inner = inner
        self._kind = elements.numel(), elements.dtype
        self._handles = [None if part is None else inner.save(part) for part in codec.encode(elements)]

    def read(self) -> Tensor:
        coded = Coded(*(None if handle is None else self._inner.load(handle) for handle in self._handles))  # type: ignore[arg-type]
        return self._way.run_of(self._codec.decode(coded, *self._kind))

    def held(self) -> list[Any]:
        return list(self._handles)


class Quantizing(Mover):
    """The tensors of one storage that writes them with fewer bits.

    Args:
        codec: how.
        least_bytes: smaller tensors stay.
        inner: what keeps the codes.
    """

    def __init__(self, codec: Codec, least_bytes: int, inner: Storage) -> None:
        super().__init__(least_bytes)
        self._codec = codec
        self._inner = inner

    def save(self, tensor: Tensor, wrappers: tuple[Tensor, ...] = ()) -> Any:
        is_leaf = tensor.requires_grad and tensor.is_leaf
        if is_leaf or tensor.dtype in DTYPES or parts_of(tensor) is not None:
            return super().save(tensor, wrappers)
        handle = self._inner.save(tensor)
        if handle is tensor:
            self.traffic.stayed[OTHER_DTYPES] += 1
            return tensor
        return KeptExactly(handle)

    def load(self, handle: Any) -> Tensor:
        return self._inner.load(handle.handle) if isinstance(handle, KeptExactly) else super().load(handle)

    def bound(self, tensor: Tensor) -> Tensor | None:
        """Return the most by which each element may come back as another number; None if every bit does."""
        if tensor.dtype not in DTYPES or (tensor.requires_grad and tensor.is_leaf) or self.reason_to_stay(tensor):
            return None
        way = Compact.of(tensor)
        run = way.run_of(self._codec.bound(way.elements_of(tensor)))
        return run.as_strided(tensor.size(), tensor.stride(), run.storage_offset())

    def _moved(self, tensor: Tensor, wrappers: tuple[Tensor, ...]) -> Moved:
        placement, _extent = placement_of(tensor)
        placement = placement.moved_by(-placement.offset)
        owner = owner_of(tensor)
        key: Any = id(owner), owner._version, tensor.dtype
        geometry = int(tensor.storage_offset()), tensor.size(), tensor.stride(), tensor.is_neg()
        piece = self._pieces.get(key)
        way = Compact.of(tensor)
        elements = way.elements_of(tensor).contiguous()
        if not isinstance(piece, CodedPiece) or piece.geometry != geometry or not piece.memory.is_of(tensor, elements):
            memory = Memory(tensor, elements, wrappers)
            memory.let_go()
            piece = CodedPiece(memory, geometry, way, elements, self._codec, self._inner)
            self.traffic.moved_bytes += elements.numel() * elements.element_size()
            self._pieces[key] = piece
        return Moved(piece, placement)

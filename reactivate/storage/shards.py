"""The parts of tensors that one rank keeps of those that all ranks hold alike, and the order in which they are gathered.

Rules, each of which has a test that fails without it:

1. Every load is one agreement of all ranks (see `agreement`), also where a rank has the tensor already: whether it has is a
   matter of what else holds it there, so it says so, and the tensor is gathered if it is missing anywhere.
2. What the ranks say includes a checksum of the whole tensor as each of them took it in. So what is gathered is what this
   rank had, and a tensor that is not the same on all ranks is refused on each of them.
3. Until the first tensor is gathered, each is agreed on as it is taken in: the first forward raises, not its backward.
4. The next tensor is gathered in advance only if all ranks name the same one.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from reactivate._types import Storage
from reactivate.storage.agreement import Notice, agree, start_gathering, waited
from reactivate.storage.moved import Moved, Mover
from reactivate.storage.pieces import Piece
from reactivate.storage.placement import Extent, Memory
from reactivate.storage.series import Series

_UNNAMED = "a tensor"


class ShardPiece(Piece):
    """A run of elements of which this rank keeps a part.

    Attributes:
        serial: which of the tensors that were taken in.
        coming: the gathered bytes, and the work that ends when they are there; None if nothing is under way.
    """

    def __init__(
        self, memory: Memory, extent: Extent, run: Tensor, serial: int, series: Series[ShardPiece], shards: Shards
    ) -> None:
        super().__init__(memory, extent)
        self.serial = serial
        self.series = series
        self.coming: tuple[Tensor, Any] | None = None
        self.device = run.device
        self._dtype = run.dtype
        self._shards = shards
        self._name = shards.name, shards.form
        content = run.view(torch.uint8)
        count, rank = dist.get_world_size(shards.group), dist.get_rank(shards.group)
        size = -(-self.memory.nbytes // count)
        mine = content[rank * size : (rank + 1) * size]
        shard = content.new_zeros(size)
        shard[: len(mine)] = mine
        self.shard_bytes = size
        self._handle = shards.storage.save(shard)

    def notice(self, kind: str, following: int = -1, *, is_there: bool = False) -> Notice:
        """Return what the other ranks have to hear."""
        name, form = self._name
        return Notice(kind, self.serial, int(self.memory.checksum), following, is_there, form, name)

    def load(self) -> Tensor:
        run = self.loaded()
        notices = self._shards.agree_on(self, run)
        if all(notice.is_there for notice in notices) and run is not None:
            return run
        if self.coming is None or not all(notice.is_there for notice in notices):
            self.start_back()
        self._shards.gather_next(notices, self.series)
        gathered = self.read()
        return self.note_loaded(gathered) if run is None else run

    def start_back(self) -> None:
        """Start to gather the bytes of all ranks: a collective."""
        self.coming = start_gathering(self._shards.storage.load(self._handle), self._shards.group)

    def read(self) -> Tensor:
        assert self.coming is not None
        found, work = self.coming
        self.coming = None
        waited(self.notice("gathers"), self._shards.group, work.wait)
        self._shards.traffic.loaded_bytes += self.memory.nbytes
        return found[: self.memory.nbytes].view(self._dtype)

    def held(self) -> list[Tensor]:
        handle = self._handle
        kept = [handle] if isinstance(handle, Tensor) else handle.piece.held() if isinstance(handle, Moved) else []
        return kept if self.coming is None else [*kept, self.coming[0]]

    @property
    def stored_bytes(self) -> int:
        return self._handle.piece.stored_bytes if isinstance(self._handle, Moved) else 0


class Shards(Mover):
    """The tensors of which the ranks of a group keep a part each.

    Args:
        group: the process group.
        storage: where this rank keeps its parts.
        least_bytes: smaller tensors stay.

    Attributes:
        name, form: of the tensor that is being taken in.
    """

    rests_in_memory = False

    def __init__(self, group: Any, storage: Storage, least_bytes: int) -> None:
        super().__init__(least_bytes)
        self.group = group
        self.storage = storage
        self.name, self.form = _UNNAMED, ""
        self._taken_in = 0
        self._has_gathered = False

    @property
    def used_bytes(self) -> int:
        """Bytes of the parts that this rank keeps now."""
        return sum(piece.shard_bytes for piece in list(self._pieces.values()) if isinstance(piece, ShardPiece))

    def take(self, tensor: Tensor, name: str) -> Any:
        """Take in a tensor that messages call `name`."""
        self.name = name or _UNNAMED
        try:
            return self.save(tensor)
        finally:
            self.name = _UNNAMED

    def save(self, tensor: Tensor, wrappers: tuple[Tensor, ...] = ()) -> Any:
        self.form = f"{str(tensor.dtype).removeprefix('torch.')}{[] if tensor.is_nested else list(tensor.shape)}"
        return super().save(tensor, wrappers)

    def reason_to_stay(self, tensor: Tensor) -> str | None:
        reason = super().reason_to_stay(tensor)
        return "they are empty" if reason is None and tensor.numel() == 0 else reason

    def put(self, run: Tensor, memory: Memory, extent: Extent) -> Piece:
        series = self.order.series(run.device)
        piece = ShardPiece(memory, extent, run, self._taken_in, series, self)
        self._taken_in += 1
        if not self._has_gathered:
            agree(piece.notice("keeps"), self.group, piece.device)  # rule 3
        series.add(piece)
        series.waiting.clear()  # nothing waits: each has been cut to its part
        return piece

    def agree_on(self, piece: ShardPiece, run: Tensor | None) -> list[Notice]:
        """Agree with the other ranks on the tensor that comes next (rules 1, 2)."""
        following = next(iter(piece.series.before(piece.number, 1)), None)
        is_idle = following is not None and following.coming is None and following.loaded() is None
        serial = following.serial if following is not None and is_idle else -1
        is_there = run is not None or piece.coming is not None
        notices = agree(piece.notice("gathers", serial, is_there=is_there), self.group, piece.device)
        self._has_gathered = True
        return notices

    def gather_next(self, notices: list[Notice], series: Series[ShardPiece]) -> None:
        """Start to gather the tensor that all ranks named (rule 4)."""
        serials = {notice.next for notice in notices}
        for reference in series.pieces if len(serials) == 1 else ():
            piece = reference()
            if piece is not None and piece.serial in serials:
                piece.start_back()

"""Agreement of ranks: before they move bytes, all of them say what they are about to do, and see what the others say.

What is said has one size, whatever it is about: ranks that are at different calls, or have tensors of different sizes, still
understand each other. So each of them raises the same error, and none waits for bytes that are not sent.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from reactivate.errors import StorageError

# torch 2.13 has another name for it, and warns of the old one.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_MARK = b"reactivate agrees"  # what another collective sends does not begin with it
_KIND, _FORM, _NAME = 8, 64, 176  # bytes of the texts
_NOTICE = struct.Struct(f"<{len(_MARK)}s3q?{_KIND}s{_FORM}s{_NAME}s")
_SIZE = _NOTICE.size


@dataclass(frozen=True)
class Notice:
    """An announcement: what a rank is about to do.

    Attributes:
        kind: "keeps" or "gathers".
        serial: which of the tensors that the ranks have taken in.
        checksum: of the whole tensor.
        next: the tensor that it could gather next, by its serial; -1 if there is none.
        is_there: whether the rank has the whole tensor already.
        form: dtype and shape.
        name: of the tensor, for messages.
    """

    kind: str
    serial: int
    checksum: int
    next: int
    is_there: bool
    form: str
    name: str

    def packed(self) -> torch.Tensor:
        """Return it as bytes."""
        texts = _cut(self.kind, _KIND), _cut(self.form, _FORM), _cut(self.name, _NAME)
        found = _NOTICE.pack(_MARK, self.serial, self.checksum, self.next, self.is_there, *texts)
        return torch.frombuffer(bytearray(found), dtype=torch.uint8)

    @classmethod
    def unpacked(cls, found: bytes) -> Notice:
        """Return what some bytes say."""
        _, serial, checksum, following, is_there, *texts = _NOTICE.unpack(found)
        kind, form, name = (text.rstrip(b"\0").decode(errors="replace") for text in texts)
        return cls(kind, serial, checksum, following, is_there, form, name)

    def __str__(self) -> str:
        return f"{self.kind} tensor {self.serial}, {self.name}, {self.form}"


def _cut(text: str, length: int) -> bytes:
    found = text.encode()
    return found if len(found) <= length else found[: length - 3] + b"..."


def agree(mine: Notice, group: Any, device: torch.device) -> list[Notice]:
    """Tell the other ranks of a group what this one is about to do, and return what each of them says.

    Args:
        group: the process group. A collective: every rank of the group has to come to it.
        device: of the tensor, where the group has no way to send what is on the CPU.

    Raises:
        StorageError: ranks are at different calls, or their tensors are not the same; on each rank.
    """
    count = dist.get_world_size(group)
    place = torch.device("cpu") if "cpu:" in dist.get_backend_config(group) else device
    found = torch.empty(count * _SIZE, dtype=torch.uint8, device=place)
    try:
        _all_gather(found, mine.packed().to(place), group=group)
    except RuntimeError as error:
        raise _silence(mine, group, error) from error
    said = bytes(found.tolist())
    parts = [said[start : start + _SIZE] for start in range(0, len(said), _SIZE)]
    strangers = [rank for rank, part in enumerate(parts) if not part.startswith(_MARK)]
    if strangers:
        raise StorageError(
            f"Rank {dist.get_rank(group)} of the {count} of reactivate.storage.Sharded {mine}, and rank "
            f"{', '.join(map(str, strangers))} ran another collective of the same size in the same group. All ranks must run "
            "the same regions in the same order, with the same policy. TORCH_DISTRIBUTED_DEBUG=DETAIL names both collectives."
        )
    notices = [Notice.unpacked(part) for part in parts]
    if len({(notice.kind, notice.serial) for notice in notices}) > 1:
        raise StorageError(
            f"The {count} ranks of reactivate.storage.Sharded are at different calls: {_by_rank(notices)}. All ranks must "
            "run the same regions in the same order, in the forward and in the backward."
        )
    if len({notice.form for notice in notices}) > 1:
        raise StorageError(
            f"reactivate.storage.Sharded was given tensors of different forms on its {count} ranks: {_by_rank(notices)}. "
            "It shards tensors that all ranks hold alike; for this one use another storage."
        )
    if len({notice.checksum for notice in notices}) > 1:
        raise StorageError(
            f"reactivate.storage.Sharded was given {mine.name}, {mine.form}, which is not the same on its {count} ranks "
            f"({_groups(notices)}). It shards tensors that all ranks hold alike. If each rank has a part of its own here "
            "(sequence or data parallel), nothing is held twice: use another storage, such as Device() or Host()."
        )
    return notices


def start_gathering(shard: torch.Tensor, group: Any) -> tuple[torch.Tensor, Any]:
    """Start to gather equal parts of all ranks: the whole, which may not be read yet, and the work to wait for."""
    found = shard.new_empty(len(shard) * dist.get_world_size(group))
    return found, _all_gather(found, shard, group=group, async_op=True)


def waited(mine: Notice, group: Any, wait: Any) -> None:
    """Wait for a collective.

    Raises:
        StorageError: it failed, or a rank did not come to it within the timeout of the group.
    """
    try:
        wait()
    except RuntimeError as error:
        raise _silence(mine, group, error) from error


def _silence(mine: Notice, group: Any, error: BaseException) -> StorageError:
    return StorageError(
        f"Rank {dist.get_rank(group)} of the {dist.get_world_size(group)} of reactivate.storage.Sharded {mine}, and the "
        "others did not come to this call within the timeout of the group: one of them raised an error, ended, or ran fewer "
        f"regions. Look at the errors of the other ranks first. ({error})"
    )


def _by_rank(notices: Sequence[Notice]) -> str:
    return "; ".join(f"rank {rank} {notice}" for rank, notice in enumerate(notices))


def _groups(notices: Sequence[Notice]) -> str:
    alike: dict[int, list[int]] = {}
    for rank, notice in enumerate(notices):
        alike.setdefault(notice.checksum, []).append(rank)
    return "; ".join(
        f"rank {', '.join(map(str, ranks))}: checksum {key & (2**64 - 1):016x}" for key, ranks in alike.items()
    )

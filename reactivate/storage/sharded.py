"""A part on each rank: for tensors that all ranks of a group hold alike."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import Tensor

from reactivate._text.sizes import size
from reactivate._types import DEVICE, Storage
from reactivate.errors import UsageError
from reactivate.storage.moved import Traffic
from reactivate.storage.shards import Shards


@dataclass(frozen=True)
class Sharded:
    """Keep one part of each tensor on each rank of a group, and gather them for the backward.

    For tensors that all ranks hold alike, as the activations between the layers of tensor-parallel code: each of n ranks
    keeps 1/n of the bytes, and up to n - 1 bytes of padding in all. Every dtype and size is moved, as bytes. In the backward
    each tensor that is read starts to gather the one that was taken in before it, beside the recomputation. Views of one
    memory are sharded once. Parameters and other leaves, and the caller's own tensors, stay as they are.

    Ranks agree before they gather: each says which tensor it is about to read, of which form, and with which checksum as it
    was taken in. A tensor that is not the same on all ranks is refused on each of them, by its name: in the forward until
    the first backward, afterwards in the backward, before any gradient is computed from it. So are ranks that are at
    different calls. A rank that does not come to the call lets the others raise after the timeout of the group.

    All ranks must run the same regions in the same order. Backwards of the same graph do: autograd runs the nodes of one
    device in the reverse order of their creation.

    Args:
        group: the process group; the default one if None.
        storage: where each rank keeps its parts: `storage.Host()` for the memory of the host.
        least_bytes: smaller tensors stay as they are, since gathering them costs more than it frees; an int or "1MiB".

    Raises:
        UsageError: there is no process group, or this process is not in it; `storage` is none, or needs all ranks too.

    Source: the partitioned activation checkpoints of ZeRO (Rajbhandari et al., 2020, section 6.1).

    Examples:
        >>> import reactivate, torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> policy = reactivate.policies.full(inputs=reactivate.storage.Sharded(dist.group.WORLD))
        >>> dist.destroy_process_group()
    """

    group: Any = None
    storage: Storage = field(default=DEVICE, kw_only=True)
    least_bytes: int | str = field(default=2**20, kw_only=True)
    shares_views = True
    takes_names = True
    is_collective = True
    _shards: Shards = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise UsageError("Sharded(group) needs a process group: call torch.distributed.init_process_group first.")
        group = dist.group.WORLD if self.group is None else self.group
        if not isinstance(group, dist.ProcessGroup):
            raise UsageError(
                f"Sharded(group) takes a process group, which this process is in; got {group!r:.60}. For a dimension of "
                'a device mesh write mesh.get_group("tp").'
            )
        if not all(callable(getattr(self.storage, name, None)) for name in ("save", "load")):
            raise UsageError(f"Sharded(storage=...) takes a storage, such as Host(); got {self.storage!r:.60}.")
        if getattr(self.storage, "is_collective", False):
            raise UsageError(
                f"Sharded(storage=...) takes a storage that each rank uses alone, such as Host(), for its part of a tensor. "
                f"{self.storage!r} needs the same tensor on all ranks."
            )
        least_bytes = size(self.least_bytes, "Sharded(least_bytes=...)")
        object.__setattr__(self, "least_bytes", least_bytes)
        object.__setattr__(self, "group", group)
        object.__setattr__(self, "_shards", Shards.of(group, self.storage, least_bytes))

    def __repr__(self) -> str:
        storage = "" if self.storage is DEVICE else f", storage={self.storage!r}"
        return f"Sharded({dist.get_world_size(self.group)} ranks{storage})"

    def save(self, tensor: Tensor, name: str = "") -> Any:
        return self._shards.take(tensor, name)

    def load(self, handle: Any) -> Tensor:
        return self._shards.load(handle)

    @property
    def traffic(self) -> Traffic:
        """Counts of the tensors that were sharded so far, and of those that stayed, with the reasons."""
        return self._shards.traffic

    @property
    def used_bytes(self) -> int:
        """Bytes that this rank keeps now."""
        return self._shards.used_bytes

    def __reduce__(self) -> Any:
        raise UsageError(
            f"{self!r} refers to a process group, which belongs to this process: apply the policy where the model is loaded."
        )

    def __deepcopy__(self, memo: Any) -> Sharded:
        return Sharded(self.group, storage=self.storage, least_bytes=self.least_bytes)

"""The storages that a plan may use: their names, how long they leave tensors in memory, how fast they are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from reactivate._types import Device, Storage
from reactivate.errors import UsageError
from reactivate.planner.cost.links import Link, link_between
from reactivate.planner.solve import Transfer
from reactivate.planner.target import Target
from reactivate.policies._base import check_storage
from reactivate.storage.disk import Disk
from reactivate.storage.disk_file import check_directory
from reactivate.storage.host import Host
from reactivate.storage.rehearsal import Rehearsal, Residence, in_pages, residence_of
from reactivate.storage.streams import works_in_host_memory

ASKED = "plan(storage=...)"


@dataclass(frozen=True, eq=False)
class Offer:
    """A storage that a plan may use.

    Attributes:
        name: what the plan calls it.
        storage: the storage.
        residence: how long it leaves tensors in memory; None where only the storage itself can tell.
        link: the way to it; None where its copies are ops like others.
        sizes: of the tensors that it may take, in whole pages, as far as they are known.
    """

    name: str
    storage: Storage
    residence: Residence | None
    link: Link | None
    sizes: set[int] = field(default_factory=set)

    @property
    def limit_bytes(self) -> int | None:
        """Return the most bytes that the tensors of a plan may take of it; None for any number."""
        if self.residence is None or self.residence.limit is None:
            return None
        # Copies of the step before may still have room of a disk.
        lingering = self.residence.in_flight * max(self.sizes, default=0) if self.residence.lingers else 0
        return max(0, self.residence.limit - lingering)

    @property
    def in_flight(self) -> int:
        """Return how many tensors may be on their way to it; 0 where the program waits for each copy."""
        return 1 if self.residence is None else self.residence.in_flight

    def of(self, moved: Sequence[int], passes: int) -> tuple[Transfer, float]:
        """Return what tensors of these sizes take of the storage and of its link, and of the program itself, in seconds."""
        stored = sum(map(self._stored, moved))
        if self.link is None:
            return Transfer(0.0, 0.0, stored), 0.0
        nbytes = passes * sum(moved)
        copies = Transfer(self.link.out_seconds(nbytes), self.link.back_seconds(nbytes), stored)
        return copies, 2 * passes * len(moved) * self.link.tensor_seconds

    def _stored(self, nbytes: int) -> int:
        """Return the most bytes that a tensor may take: memory for a larger one is used again for it."""
        assert self.residence is not None
        exact = in_pages(nbytes)
        return max((size for size in self.sizes if exact <= size <= exact * (1 + self.residence.slack)), default=exact)

    def rehearsed(self, *, at_once: bool) -> Storage:
        """Return what is in its target while a step is simulated.

        Args:
            at_once: whether tensors go and come back at once, so that what one unit moves does not depend on others.
        """
        if self.residence is None:
            return self.storage
        return Rehearsal(self.residence.at_once() if at_once else self.residence)


def storages_in(storages: Storage | Iterable[Storage] | None) -> dict[str, Storage]:
    """Return the storages that were given, by their names.

    Raises:
        UsageError: one of them is none.
    """
    if storages is None:
        return {}
    given: list[Any] = list(storages) if isinstance(storages, (list, tuple)) else [storages]
    found: dict[str, Storage] = {}
    for storage in given:
        check_storage(storage, ASKED)
        if isinstance(storage, Device):
            raise UsageError(
                f"{ASKED} takes storages that move tensors, such as Host(); Device() leaves them where they are."
            )
        name = type(storage).__name__.lower()
        number = sum(other.partition(" ")[0] == name for other in found)
        found[f"{name} {number + 1}" if number else name] = storage
    return found


def check_directories(storages: Iterable[Storage], target: Target) -> None:
    """See to it, before anything runs, that the directories of disks are there, if the target is here.

    Raises:
        UsageError: one of them is not.
    """
    for storage in storages:
        if target.is_here and isinstance(storage, Disk):
            check_directory(storage.path)


def offer_of(name: str, storage: Any, target: Target) -> Offer:
    """Return a storage as it can be used at a target.

    Raises:
        UsageError: it cannot be used there, or its speed is unknown.
    """
    if isinstance(storage, Host):
        _check_host(storage, target)
    residence = residence_of(storage, on_host=target.is_host)
    if residence is None:
        return Offer(name, storage, None, None)
    if not target.is_here and storage.limit is None:  # what is free here says nothing of there
        residence = replace(residence, limit=None)
    return Offer(name, storage, residence, _link_of(name.partition(" ")[0], storage, target))


def _check_host(storage: Host, target: Target) -> None:
    if target.is_host:
        raise UsageError(
            f"{ASKED}: {storage!r} moves tensors of accelerators, and the model is on a CPU, whose memory is the host's. "
            "Use reactivate.storage.Disk(path), or name the device that you plan for: plan(device='H100-SXM')."
        )
    if target.is_here and works_in_host_memory(target.device):
        raise UsageError(f"{ASKED}: {storage!r} would move nothing, since {target.device} works in the host's memory.")


def _link_of(kind: str, storage: Storage, target: Target) -> Link:
    if target.is_here:
        try:
            return link_between(storage, target.device)
        except OSError as error:
            raise UsageError(f"{ASKED}: {storage!r} cannot be used: {error}.") from error
    link = target.spec.links.get(kind)
    if link is None:
        raise UsageError(
            f"{ASKED}: it is unknown how fast {target.spec.name} reaches {storage!r}. Describe the device in a file with "
            f'"links": {{"{kind}": {{"out_bytes_per_second": ..., "back_bytes_per_second": ...}}}}, and pass '
            'device="my_device.json".'
        )
    return link

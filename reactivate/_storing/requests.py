"""Requests to storages: a warning if tensors were to be moved, and none was."""

from __future__ import annotations

from typing import Any
from weakref import WeakValueDictionary

from torch import Tensor

from reactivate._storing.aside import aside
from reactivate._text.warnings import warn
from reactivate._text.words import counted
from reactivate._types import Device, Storage


class IdleStorage:
    """A storage that has moved nothing so far.

    Attributes:
        storage: the storage.
        asked: how many tensors it was to take in.
    """

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        self.asked = 0


idle: list[IdleStorage] = []  # of storages that have moved nothing since they were first asked: mostly none
_known: WeakValueDictionary[int, Any] = WeakValueDictionary()  # {id: the storage}, of those that need no more watching


def take_in(storage: Storage, tensor: Tensor, name: str) -> Any:
    """Hand a tensor, called `name` in messages, to a storage; return its handle: the tensor itself where that stays."""
    takes_names = getattr(storage, "takes_names", False)
    handle = aside(storage.save, tensor, name) if takes_names else aside(storage.save, tensor)
    if _is_watched(storage):
        request = _find(storage)
        request.asked += 1
        if handle is not tensor:
            idle.remove(request)
            _known[id(storage)] = storage
    return handle


def note_leaves(storage: Storage) -> None:
    """Note that a storage is to keep the inputs of a region."""
    if _is_watched(storage):
        _find(storage)


def _is_watched(storage: Any) -> bool:
    """Return whether a storage, and each that is equal to it, may have moved nothing so far.

    A policy may make one for each call. What cannot be referred to weakly is not watched, nor what only rehearses.
    """
    if id(storage) in _known or isinstance(storage, Device) or type(storage).__weakrefoffset__ == 0:
        return False
    if getattr(storage, "is_rehearsal", False):
        return False
    if any(storage == other for other in list(_known.values())):
        _known[id(storage)] = storage
        return False
    return True


def _find(storage: Storage) -> IdleStorage:
    found = next((request for request in idle if request.storage == storage), None)
    if found is None:
        found = IdleStorage(storage)
        idle.append(found)
    return found


def refuse_silence() -> None:
    """Warn of the storages that have moved nothing, now that a backward reads what they were to keep: once each."""
    while idle:
        request = idle.pop()
        storage = request.storage
        _known[id(storage)] = storage
        stayed = getattr(getattr(storage, "traffic", None), "stayed", None)
        reasons = "; ".join(f"{counted(number, 'tensor')}: {reason}" for reason, number in (stayed or {}).items())
        asked = "the 1 tensor" if request.asked == 1 else f"all {request.asked:,} tensors"
        found = (
            f"{asked} that it was given stayed ({reasons or 'it gave them back'})"
            if request.asked
            else "what the regions are called with are parameters, other leaves, or tensors in lists and objects, which stay"
        )
        remedy = " ".join(text for reason, text in _REMEDIES.items() if reason in reasons) or "Leave it out."
        warn(f"The storage {storage!r} has moved nothing in this step: {found}. {remedy}")


_REMEDIES = {
    "smaller than": "To move small tensors as well, pass least_bytes=0.",
    "on the host already": "For tensors of a CPU, use reactivate.storage.Disk in its place, or none.",
}
"""{words of a reason to stay: what to do about it}."""

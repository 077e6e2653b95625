"""Saved calls as a region keeps them: slots that need no recomputation, results, and what is noted beside them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import CodeType
from typing import Any

import torch
from torch import Tensor

from reactivate._engine.kept_calls.collective_writes import rely_on
from reactivate._engine.kept_calls.derive import Derived
from reactivate._engine.kept_calls.results import Contents
from reactivate._engine.record import Saved, SharedSlot
from reactivate._engine.requests import take_in
from reactivate._engine.stored_form import Form
from reactivate._torch.modules import is_distributed_run
from reactivate._torch.saved import SavedTensor, save_tensor
from reactivate._types import DEVICE, Storage


class SiteSlot(SharedSlot):
    """A slot of a saved call: its tensor is kept, or made from an argument."""

    __slots__ = ("kept", "recipe")
    recipe: Derived | None
    kept: Any  # a `Kept`, or None


class Kept:
    """A tensor that is kept for the backward.

    Attributes:
        is_overwritten: whether a collective in place has written to it, which moves no version.
    """

    __slots__ = ("__weakref__", "form", "handle", "is_overwritten", "storage", "tensor", "version")

    def __init__(self, tensor: Tensor, version: int, storage: Storage) -> None:
        self.tensor: Tensor | None = tensor
        self.version = version
        self.storage = storage
        self.handle: Any = None
        self.is_overwritten = False

    def is_written(self) -> bool:
        """Return whether the tensor was written to, as long as it is not settled."""
        return self.is_overwritten or (self.tensor is not None and self.tensor._version != self.version)

    def settle(self, name: str) -> None:
        """Hand it to its storage, and to autograd, so that hooks around the region see it (Rule 9).

        Args:
            name: of the tensor, for the messages of storages.
        """
        tensor, self.tensor = self.tensor, None
        if tensor is not None and tensor._version == self.version:  # otherwise there is nothing that may be read
            handle = tensor
            if self.storage is not DEVICE:
                self.form = Form.of(tensor)
                handle = take_in(self.storage, tensor, name)
            self.handle = save_tensor(handle, False) if isinstance(handle, Tensor) else handle

    def load(self) -> Tensor:
        """The tensor.

        Raises:
            RuntimeError: autograd's own, where it was written to since.
            StorageError: the storage gives back something else.
        """
        if self.handle is None:
            raise RuntimeError("what a saved call keeps has been modified by an inplace operation")
        handle = self.handle.unpack() if type(self.handle) is SavedTensor else self.handle
        if self.storage is DEVICE:
            return handle  # type: ignore[no-any-return]
        return self.form.in_class(self.form.load(self.storage, handle))


class There(Kept):
    """A parameter, or a view of one: it is there anyway, and no hook need see it."""

    __slots__ = ()

    def __init__(self, parameter: Tensor, version: int) -> None:
        self.tensor = parameter
        self.version = version
        self.storage = DEVICE
        self.handle = None
        self.is_overwritten = False

    def settle(self, name: str) -> None:
        if self.tensor is not None:
            self.handle, self.tensor = self.tensor, None

    def load(self) -> Tensor:
        found: Tensor = self.handle
        if found._version != self.version:
            raise RuntimeError("a parameter that a saved call keeps has been modified by an inplace operation")
        return found


# What is saved in a frame of this code is read more than once: a region around this one has to have what is kept for a
# recomputation and for the backward.
SETTLING_CODE = Kept.settle.__code__


class SavedSite:
    """One saved call.

    Attributes:
        number: which of the calls that the policy has a say in.
        label: what was called, for messages and to see that the recomputation calls the same.
        start, stop: which entries of the record's `saved` are its.
        derived: the last of these that a recomputation derives from the arguments, -1 if there is none.
        count: how many tensors are among its arguments.
        outputs: the tensors that it returned, each a `Kept` or the number of an argument. None: not kept.
        requires: for each of these, whether it needs a gradient.
        contents: what it returned around them.
        changes: what brings guarded state to where the call left it.
        reason: why it runs again in recomputations, None if it does not.
        is_function: whether it is a custom `autograd.Function`.
        is_nested: whether it is one that another one's `forward` calls.
        place: the code and the instruction that made the call.
        is_placed: whether that is inside of the region, and so the same in a recomputation.
        scalars: the numbers and texts among its arguments, for a comparison; None if there is none in this call.
        bits: of what is kept, until the forward is over, if its code may write to that without a new version.
    """

    __slots__ = (
        *(
            "bits",
            "changes",
            "count",
            "derived",
            "is_function",
            "is_nested",
            "is_placed",
            "label",
            "number",
            "outputs",
            "path",
            "place",
            "reason",
            "requires",
            "scalars",
        ),
        *("contents", "start", "stop"),
    )
    number: int
    label: str
    is_function: bool
    is_nested: bool
    path: str | None
    start: int
    stop: int
    derived: int
    count: int
    outputs: list[Any] | None
    requires: list[bool]
    contents: Contents | None  # None: a tensor and nothing around it
    changes: Sequence[Callable[[], Any]]
    reason: str | None
    place: tuple[CodeType, int]
    is_placed: bool
    scalars: list[Any] | None
    bits: Any  # `BitsBefore`, or None


class Argument:
    """Says that a call returned one of its arguments."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number


def last_needed(saved: Sequence[Saved], sites: Sequence[SavedSite]) -> int:
    """Return the last entry that only a recomputation can fill, -1 if there is none.

    Slots that nobody has any more need no filling, but in a group of processes: whether one is gone may depend on when the
    collector ran, and ranks whose recomputations end in different places do not run the same collectives.
    """
    if is_distributed_run():
        return _last_of_all(len(saved), sites)
    for index in range(len(saved) - 1, -1, -1):
        slot = saved[index][0]()
        if slot is not None and getattr(slot, "kept", None) is None:
            return index
    return -1


def _last_of_all(count: int, sites: Sequence[SavedSite]) -> int:
    """Return what `last_needed` does, with every slot needed whose tensor is not kept."""
    last = count - 1
    for site in reversed(sites):
        if site.stop <= last:
            break  # something was saved behind it
        if site.reason is None and site.derived < 0:
            last = site.start - 1
        elif site.start < site.stop:
            return last if site.reason is not None else site.derived
    return last


def kept_among(outputs: Sequence[Any]) -> list[Kept]:
    """Return what is kept of the results of a call."""
    return [item for item in outputs if isinstance(item, Kept)]


def is_parameter(tensor: Tensor) -> bool:
    """Return whether a tensor is a parameter, or a view of one: then it is there anyway."""
    base = tensor._base
    if base is None:
        return tensor.requires_grad and tensor.is_leaf
    return base.requires_grad and base.is_leaf


def keep(tensor: Tensor, version: int, storage: Storage, kept: dict[Any, Kept]) -> Kept:
    """`tensor` without its graph, which would otherwise hold itself; a parameter as it is: it is there anyway.

    Args:
        version: of the tensor, when it was saved or returned: if it is written to afterwards, it cannot be read.
    """
    if is_parameter(tensor):
        return There(tensor.detach(), version)
    key: Any = id(tensor)
    # A result that was saved is another object. On the device that costs nothing; another storage would keep it twice.
    if storage is not DEVICE and type(tensor) is Tensor and tensor.layout is torch.strided:
        memory = tensor.untyped_storage()._cdata
        key = (memory, tensor.storage_offset(), tensor.size(), tensor.stride(), tensor.dtype)
    found = kept.get(key)
    if found is None or found.version != version:
        found = kept[key] = Kept(tensor.detach(), version, storage)
        if is_distributed_run():
            rely_on(found, (tensor,))
    return found

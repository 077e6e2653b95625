"""A saved call as its region keeps it: the slots that need no recomputation, its results, and what is noted beside them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from reactivate._passes.check import BitsBefore
from reactivate._passes.observing import keeping, observers
from reactivate._passes.places import CodeLocation
from reactivate._saved_calls.collective_writes import rely_on
from reactivate._saved_calls.derivation import Derivation
from reactivate._saved_calls.results import Contents
from reactivate._storing.form import Form
from reactivate._storing.requests import take_in
from reactivate._torch.autograd import SavedTensor, save_tensor
from reactivate._torch.modules import is_distributed_run
from reactivate._types import DEVICE, Storage


class Slot:
    """A handle for autograd in the place of a number, where it matters whether a graph still needs the saved tensor.

    Attributes:
        number: of the saved tensor.
        kept: what a saved call keeps for it; otherwise None.
        derivation: how it is derived from an argument of a saved call; otherwise None.
    """

    __slots__ = ("__weakref__", "derivation", "kept", "number")

    def __init__(self, number: int) -> None:
        self.number = number
        self.kept: Kept | None = None
        self.derivation: Derivation | None = None


class Kept:
    """A tensor that is kept for the backward.

    Attributes:
        is_there_anyway: whether it is a parameter, or a view of one, which no hook need see.
        is_overwritten: whether a collective in place has written to it, which moves no version.
        is_shared: whether a recomputation and the backward both read it, through saved-tensor hooks around the region:
            those of torch's checkpoint unpack a tensor once in a backward.
    """

    __slots__ = (
        *("__weakref__", "form", "handle", "is_overwritten", "is_shared", "is_there_anyway", "storage", "tensor"),
        "version",
    )

    def __init__(self, tensor: Tensor, version: int, storage: Storage, is_there_anyway: bool = False) -> None:
        self.tensor: Tensor | None = tensor
        self.version = version
        self.storage = storage
        self.handle: Any = None
        self.is_overwritten = self.is_shared = False
        self.is_there_anyway = is_there_anyway

    def is_written(self) -> bool:
        """Return whether the tensor was written to, as long as it is not settled."""
        return self.is_overwritten or (self.tensor is not None and self.tensor._version != self.version)

    def settle(self, name: str) -> None:
        """Hand it to its storage, and to autograd, so that hooks around the region see it (Rule 9).

        Args:
            name: of the tensor, for the messages of storages.
        """
        tensor, self.tensor = self.tensor, None
        if tensor is not None and self.is_there_anyway:
            self.handle = tensor
        elif tensor is not None and tensor._version == self.version:  # otherwise there is nothing that may be read
            handle = tensor
            if self.storage is not DEVICE:
                self.form = Form.of(tensor)
                handle = take_in(self.storage, tensor, name)
            keeping.owner = self if observers else None
            try:  # not `keeping_for`: a region around this one knows by this code that it may read the tensor again
                self.handle = save_tensor(handle, False) if isinstance(handle, Tensor) else handle
            finally:
                keeping.owner = None

    def load(self) -> Tensor:
        """The tensor.

        Raises:
            RuntimeError: autograd's own, where it was written to since.
            StorageError: the storage gives back something else.
        """
        if self.handle is None or (self.is_there_anyway and self.handle._version != self.version):
            raise RuntimeError("what a saved call keeps has been modified by an inplace operation")
        handle = self.handle.unpack() if type(self.handle) is SavedTensor else self.handle
        if self.storage is DEVICE:
            return handle  # type: ignore[no-any-return]
        return self.form.in_class(self.form.load(self.storage, handle))


# What is saved in a frame of this code is read more than once: a region around this one has to have what is kept for a
# recomputation and for the backward.
SETTLING_CODE = Kept.settle.__code__


@dataclass(slots=True, eq=False)
class SavedCall:
    """One saved call.

    Attributes:
        number: which of the calls that the policy has a say in.
        label: its name in messages; the recomputation must call the same.
        path: of the module, of a module's call.
        reason: why it runs again in recomputations, None if it does not.
        location: the code and the instruction that made the call.
        is_inside: whether that is inside of the region, and so the same in a recomputation.
        start, stop: which entries of the region's `saved` are its; `stop` is -1 until it ends.
        count: how many tensors are among its arguments.
        scalars: the numbers and texts among its arguments, for a comparison; None if there is none in this call.
        derived: the last of its entries that a recomputation derives from the arguments, -1 if there is none.
        outputs: the tensors that it returned, each a `Kept`, or the number of the argument that it is; None: not kept.
        requires: for each of these, whether it needs a gradient.
        contents: the result around them; None for a tensor alone.
        streams: functions that bring random streams, and the place in the region, to where the call left them.
        bits: of what is kept, until the forward is over, if its code may write to that without a new version.
        written_on_device: returns whether it wrote to state on a device, of which no version tells; None if it has none.
        is_function: whether it is a custom `autograd.Function`.
        is_nested: whether it is one that another one's `forward` calls.
    """

    number: int
    label: str
    path: str | None
    reason: str | None
    location: CodeLocation
    is_inside: bool
    start: int
    count: int
    scalars: list[Any] | None
    stop: int = -1
    derived: int = -1
    outputs: list[Kept | int] | None = None
    requires: Sequence[bool] = ()
    contents: Contents | None = None
    streams: Sequence[Callable[[], Any]] = ()
    bits: BitsBefore | None = None
    written_on_device: Callable[[], bool] | None = None
    is_function: bool = False
    is_nested: bool = False

    def kept(self) -> list[Kept]:
        """Return what is kept of its results."""
        return [item for item in self.outputs or () if isinstance(item, Kept)]


def last_needed(region: Any) -> int:
    """Return the last saved tensor that only a recomputation can tell, -1 if there is none.

    Those that no graph has any more need no recomputation, but in a group of processes: whether one is gone may depend on
    when the collector ran, and ranks whose recomputations end in different places do not run the same collectives.
    """
    if is_distributed_run():
        return _last_of_all(len(region.saved), region.saved_calls)
    return next(filter(region.is_recomputed, range(len(region.saved) - 1, -1, -1)), -1)


def _last_of_all(count: int, calls: Sequence[SavedCall]) -> int:
    """Return what `last_needed` does, with every slot needed whose tensor is not kept."""
    last = count - 1
    for call in reversed(calls):
        if call.stop <= last:
            break  # something was saved behind it
        if call.reason is None and call.derived < 0:
            last = call.start - 1
        elif call.start < call.stop:
            return last if call.reason is not None else call.derived
    return last


def is_parameter(tensor: Tensor) -> bool:
    """Return whether a tensor is a parameter, or a view of one: then it is there anyway."""
    base = tensor._base
    if base is None:
        return tensor.requires_grad and tensor.is_leaf
    return base.requires_grad and base.is_leaf


def keep(tensor: Tensor, version: int, storage: Storage, kept: dict[Any, Kept], is_distributed: bool) -> Kept:
    """`tensor` without its graph, which would otherwise hold itself; a parameter as it is: it is there anyway.

    Args:
        version: of the tensor, when it was saved or returned: if it is written to afterwards, it cannot be read.
        is_distributed: whether collectives may write to it.
    """
    if is_parameter(tensor):
        return Kept(tensor.detach(), version, DEVICE, is_there_anyway=True)
    key: Any = id(tensor)
    # A result that was saved is another object. On the device that costs nothing; another storage would keep it twice.
    if storage is not DEVICE and type(tensor) is Tensor and tensor.layout is torch.strided:
        memory = tensor.untyped_storage()._cdata
        key = (memory, tensor.storage_offset(), tensor.size(), tensor.stride(), tensor.dtype)
    found = kept.get(key)
    if found is None or found.version != version:
        found = kept[key] = Kept(tensor.detach(), version, storage)
        if is_distributed:
            rely_on(found, (tensor,))
    return found

"""Inputs of regions that a storage keeps: `Recompute(inputs=storage)`.

What goes to the storage is what is not kept otherwise: tensors that ops have computed. Parameters and other leaves are there
anyway. Inside of a region, or of another library's, nothing goes: the region around it keeps nothing of that in any case.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import ref

from torch import Tensor

from reactivate._snapshot.inputs import InputSpec, Memo
from reactivate._storing.form import Form
from reactivate._storing.requests import note_leaves, take_in
from reactivate._torch.autograd import SavedTensor, as_a_result, save_tensor
from reactivate._types import Storage


class StoredInput(InputSpec):
    """A tensor in a storage: the original, as long as it lives unmodified, or what the storage gives back."""

    __slots__ = ("_attributes", "_form", "_handle", "_original", "_version", "storage")

    def __init__(self, tensor: Tensor, storage: Storage, handle: Any) -> None:
        self.storage = storage
        # A handle that is a tensor is seen by the hooks around the region (Rule 9).
        self._handle = save_tensor(handle, False) if isinstance(handle, Tensor) else handle
        self._form = Form.of(tensor)
        self._original = ref(tensor)
        self._version = tensor._version
        # The tensors that a wrapper is made of are attributes, too: these the storage has.
        parts = tensor.__tensor_flatten__()[0] if hasattr(type(tensor), "__tensor_flatten__") else ()  # type: ignore[attr-defined]
        self._attributes = {name: value for name, value in vars(tensor).items() if name not in parts}

    def rebuild(self, memo: Memo) -> Tensor:
        original = self._original()
        if original is not None and original._version != self._version:
            original = None
        if original is not None and not getattr(self.storage, "is_collective", False):
            return original
        tensor = self._form.in_class(as_a_result(self._form.load(self.storage, self.handle()).detach()))
        if original is not None:  # the other ranks may have no original, and need this one's part
            return original
        if self._attributes:
            vars(tensor).update(self._attributes)
        return tensor

    def handle(self) -> Any:
        """Return what the storage gave for the tensor."""
        return self._handle.unpack() if type(self._handle) is SavedTensor else self._handle


def store_for(storage: Storage, name: str) -> Callable[[Tensor, str], StoredInput | None]:
    """Return what hands the inputs of a region to a storage; messages call the region `name`."""
    note_leaves(storage)

    def store(tensor: Tensor, place: str) -> StoredInput | None:
        handle = take_in(storage, tensor, f"`{place}` of {name}")
        return None if handle is tensor else StoredInput(tensor, storage, handle)

    return store

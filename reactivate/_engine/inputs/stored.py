"""Inputs of regions that a storage keeps: `Recompute(inputs=storage)`.

What goes to the storage is what nobody else keeps: tensors that ops have computed. Parameters and other leaves are there
anyway. Inside of a region, or of another library's, nothing goes: the region around it keeps nothing of that in any case.
"""

from __future__ import annotations

import functools
from typing import Any
from weakref import ref

from torch import Tensor
from torch.nn import Module

from reactivate._engine.inputs.specs import InputSpec, Memo
from reactivate._engine.requests import take_in
from reactivate._engine.stored_form import Form
from reactivate._torch.autograd import give_back
from reactivate._torch.saved import SavedTensor, save_tensor
from reactivate._types import Storage


class StoredInput(InputSpec):
    """A tensor in a storage: the original, as long as somebody has it unmodified, or what the storage gives back.

    Attributes:
        storage: where it is.
    """

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
        tensor = self._form.in_class(give_back(self._form.load(self.storage, self.handle()).detach()))
        if original is not None:  # the other ranks may have no original, and need this one's part
            return original
        if self._attributes:
            vars(tensor).update(self._attributes)
        return tensor

    def handle(self) -> Any:
        """Return what the storage gave for the tensor."""
        return self._handle.unpack() if type(self._handle) is SavedTensor else self._handle


def name_of_region(fn: Any) -> str:
    """Return the name of a region that was given none: of its function, or of its module's class."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    name = None if isinstance(fn, Module) else getattr(fn, "__qualname__", None)
    return name if isinstance(name, str) else type(fn).__name__


def stored(tensor: Tensor, storage: Storage, name: str) -> StoredInput | None:
    """Hand a tensor to a storage, by its name for messages; None if it stays where it is."""
    handle = take_in(storage, tensor, name)
    return None if handle is tensor else StoredInput(tensor, storage, handle)

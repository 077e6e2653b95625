"""The form of a tensor that a storage keeps: what comes back has the same, or the storage is named."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from reactivate._snapshot.geometry import distinct
from reactivate._storing.aside import aside
from reactivate._torch.modes import run_unseen
from reactivate._torch.modules import has_memory
from reactivate._types import Storage
from reactivate.errors import StorageError


class Form:
    """Class, shape, strides, dtype and device of a tensor, as the storage takes it in."""

    __slots__ = ("_device", "_dtype", "_has_memory", "_kind", "_shape", "_strides")

    def __init__(self, tensor: Tensor) -> None:
        self._kind = type(tensor)
        self._dtype = tensor.dtype
        self._device = tensor.device
        self._shape = None if tensor.is_nested else tensor.shape
        # Tensors that are made of others say themselves what their strides are.
        self._has_memory = has_memory(self._kind)
        self._strides = tensor.stride() if self._has_memory and tensor.layout is torch.strided else None

    @classmethod
    def of(cls, tensor: Tensor) -> Form:
        """Return that of `tensor`, unseen by modes."""
        form: Form = aside(cls, tensor)
        return form

    def load(self, storage: Storage, handle: Any) -> Tensor:
        """Return what a storage gives back, in this form.

        Raises:
            StorageError: it is something else.
        """
        found: Tensor = aside(self._load, storage, handle)
        return found

    def _load(self, storage: Storage, handle: Any) -> Tensor:
        found = storage.load(handle)
        if not isinstance(found, Tensor) or self._differs(found):
            raise StorageError(
                f"The storage {storage!r} was given {self._in_words()}, and gives back {_described(found)}. Its `load` must "
                "return the tensor that its `save` took in; reactivate.storage.contract.check tells what else it has to keep."
            )
        is_other = self._strides is not None and found.stride() != self._strides
        return self._with_strides(found) if is_other else found

    def in_class(self, tensor: Tensor) -> Tensor:
        """Return `tensor` in its class: autograd makes a plain tensor of one whose class is only a Python name for it."""
        if not self._has_memory or type(tensor) is self._kind:
            return tensor
        made: Tensor = run_unseen(tensor.as_subclass, self._kind)
        return made

    def _differs(self, found: Tensor) -> bool:
        shape = None if found.is_nested else found.shape
        is_other = shape != self._shape or found.dtype != self._dtype or found.device != self._device
        return is_other or found.is_inference() or not (self._has_memory or type(found) is self._kind)

    def _with_strides(self, found: Tensor) -> Tensor:
        """Return the elements with the strides that they had: on these, the bits of some ops depend."""
        assert self._strides is not None
        assert self._shape is not None
        tensor = torch.empty_strided(self._shape, self._strides, dtype=self._dtype, device=self._device)
        distinct(tensor, tensor).copy_(distinct(found, tensor))
        return tensor

    def _in_words(self) -> str:
        shape = "" if self._shape is None else f" of shape {tuple(self._shape)}"
        return f"a {self._kind.__name__}{shape}, {self._dtype} on {self._device}"


def _described(found: Any) -> str:
    if not isinstance(found, Tensor):
        return f"{found!r:.60}, which is no tensor"
    return f"{Form(found)._in_words()}{', an inference tensor' if found.is_inference() else ''}"

"""The least that a checkpoint made of saved-tensor hooks does in Python. It restores nothing: a floor, and not for use.

It matches saved tensors by their order, compares their metadata and stops early, as torch's and ours do. What they cost
beyond it, they spend on being right.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


class _Slot:
    __slots__ = ("__weakref__", "value")
    value: Tensor | None


class _Complete(BaseException):
    pass


def bare(fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a function of tensors, recomputed in the backward."""

    def checkpointed(*args: Tensor) -> Tensor:
        saved: list[tuple[ref[_Slot], Any]] = []

        def pack(tensor: Tensor) -> _Slot:
            slot = _Slot()
            slot.value = None
            saved.append((ref(slot), _metadata_of(tensor)))
            return slot

        def unpack(slot: _Slot) -> Tensor:
            if slot.value is None:
                again = [arg.detach().requires_grad_(arg.requires_grad) for arg in args]
                with torch.enable_grad(), _filling(saved), suppress(_Complete):
                    fn(*again)
            value, slot.value = slot.value, None
            assert value is not None
            return value

        with saved_tensors_hooks(pack, unpack):
            return fn(*args)

    return checkpointed


def _metadata_of(tensor: Tensor) -> Any:
    return tensor.shape, tensor.dtype, tensor.device, tensor._version


def _filling(saved: list[tuple[ref[_Slot], Any]]) -> AbstractContextManager[Any]:
    entries, last = iter(saved), saved[-1]

    def pack(tensor: Tensor) -> Tensor:
        entry = next(entries)
        if entry[1] != _metadata_of(tensor):
            raise RuntimeError(f"The recomputation saves {_metadata_of(tensor)}, where the forward saved {entry[1]}.")
        value = tensor.detach() if tensor.requires_grad and not tensor.is_leaf else tensor
        slot = entry[0]()
        if slot is not None:
            slot.value = value
        if entry is last:
            raise _Complete
        return value

    return saved_tensors_hooks(pack, lambda tensor: tensor)

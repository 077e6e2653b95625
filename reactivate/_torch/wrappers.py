"""Tensors of a class of ours that have no memory of their own."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor

from reactivate._torch.ways import find

_Kind = TypeVar("_Kind", bound=Tensor)

_make: Any = find("torch.Tensor._make_wrapper_subclass")


def without_memory(kind: type[_Kind], like: Tensor, dtype: torch.dtype) -> _Kind:
    """Return a tensor of class `kind` with the shape, strides and device of another, and no memory behind it."""
    return _make(  # type: ignore[no-any-return]
        kind, like.shape, strides=like.stride(), storage_offset=like.storage_offset(), dtype=dtype, device=like.device
    )

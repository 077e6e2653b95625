"""Which tensors share memory."""

from __future__ import annotations

from operator import attrgetter

import torch
from torch import Tensor
from torch.nn import Parameter, UninitializedBuffer, UninitializedParameter

from reactivate._torch.classes import has_memory

_STRIDED = torch.strided
_is_of_xla = attrgetter("is_xla")  # of each tensor; `device.type` would cost ten times as much


def memory_of(tensor: Tensor) -> int | None:
    """Return what tensors have in common that share memory, None where that cannot be told."""
    kind = type(tensor)
    if kind is not Tensor and kind is not Parameter:
        if kind is UninitializedParameter or kind is UninitializedBuffer:
            return None
        if not has_memory(kind):
            return None
    if tensor.layout is not _STRIDED or not (tensor.is_cpu or not (tensor.is_meta or _is_of_xla(tensor))):
        return None
    return tensor.untyped_storage()._cdata  # type: ignore[no-any-return]

"""Devices: their random number generators, and which device and stream is current."""

from __future__ import annotations

import functools

import torch

from reactivate._backends.base import Backend
from reactivate._backends.cuda import CudaBackend
from reactivate._compat import accelerator_device

__all__ = ["Backend", "CudaBackend", "accelerator"]


def accelerator() -> Backend | None:
    """The backend of this machine's accelerator, None if torch has none."""
    # Asked each time: a privateuse1 backend is registered after torch is imported.
    device = accelerator_device()
    return None if device is None else _backend(device.type)


@functools.cache
def _backend(device_type: str) -> Backend | None:
    module = getattr(torch, device_type, None)
    if module is None:
        return None
    return (CudaBackend if device_type == "cuda" else Backend)(device_type, module)

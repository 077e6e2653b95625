"""Devices: their random number generators, and which device and stream is current."""

from __future__ import annotations

import functools
from typing import Any

import torch

from reactivate._backends.base import Backend
from reactivate._backends.cuda import CudaBackend
from reactivate._torch.rng import accelerator_device, xla_runtime
from reactivate._xla.tpu import TpuBackend

__all__ = ["Backend", "CudaBackend", "accelerator", "backends", "current_place", "offloads_in_graphs", "synchronize"]


def accelerator() -> Backend | None:
    """The backend of this machine's accelerator, None if torch has none."""
    # Asked each time: a privateuse1 backend is registered after torch is imported.
    device = accelerator_device()
    return None if device is None else _backend_of(device)


def current_place() -> tuple[Any, Any] | None:
    """Return the current device and stream of the accelerator, None if none is in use."""
    device = accelerator_device()
    if device is None:
        return None
    backend = _backend_of(device)
    return backend.read_place() if backend is not None and backend.is_initialized() else None


def _backend_of(device: torch.device) -> Backend | None:
    kind = _type_of(device)
    if kind == "jax":  # torchax's, whose tensors no region takes
        return None
    module = getattr(torch, kind, None)  # which a privateuse1 backend may register later
    return None if module is None else _backend(kind, module)


def synchronize() -> None:
    """Wait for the accelerator, if one is in use."""
    backend = accelerator()
    if backend is not None and backend.is_initialized():
        torch.accelerator.synchronize()


def backends() -> tuple[Backend, ...]:
    """The backends of all devices but the CPU: the accelerator's, and XLA's, which torch does not count as one."""
    found = accelerator()
    known = () if found is None else (found,)
    if found is not None and found.device_type != "cuda" and torch.cuda.is_initialized():
        # torch has one accelerator: a library's own device goes before its own.
        known = (*known, _backend("cuda", torch.cuda))
    if xla_runtime() is not None:
        from reactivate._xla.device import BACKEND  # an optional package

        known = (*known, BACKEND)
    return known


@functools.cache  # torch makes a text of it each time, which takes three times as long
def _type_of(device: torch.device) -> str:
    return device.type


@functools.cache
def _backend(device_type: str, module: Any) -> Backend:
    return _KINDS.get(device_type, Backend)(device_type, module)


def offloads_in_graphs(device_type: str) -> bool:
    """Return whether the compiler of a kind of device moves results to the host that torch's tags say so of."""
    return _KINDS.get(device_type, Backend).offloads_in_graphs


_KINDS: dict[str, type[Backend]] = {"cuda": CudaBackend, "tpu": TpuBackend}

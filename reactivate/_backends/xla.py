"""XLA: one seed as the state of a device's random numbers, and a barrier that its compiler does not see through.

Imported only where torch_xla is.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from reactivate._backends.base import Backend
from reactivate._torch.devices import register_device_module, xla_runtime

_LEAST, _MOST = 0, 2**64 - 1
_FIRST_SEED = 101  # of every device, whatever `torch.manual_seed` said before torch_xla was there


def barrier(tensors: list[Tensor]) -> list[Tensor]:
    """The fence of XLA: aliases behind one optimisation barrier.

    Source: OptimizationBarrier in XLA's operation semantics. It works in place, on what a tensor stands for: so not on
    the caller's tensors, which would all become outputs of the graph, but on clones, which on XLA are handles.
    """
    aliases = [_plain(tensor).detach().clone() for tensor in tensors]
    xla_runtime()._xla_optimization_barrier_(aliases)
    return aliases


def _plain(tensor: Tensor) -> Tensor:
    """A tensor that is sharded over devices is a wrapper of one that XLA knows."""
    return getattr(tensor, "global_tensor", tensor)


class DeviceModule(ModuleType):
    """A stand-in for `torch.xla`: the functions that torch's own code asks of the module of a device type."""

    def device_count(self) -> int:
        """Return the number of devices of this process."""
        return len(_devices())

    def is_available(self) -> bool:
        """Return whether there is a device."""
        return self.is_initialized() and bool(_devices())

    def is_initialized(self) -> bool:
        """Return whether the runtime has begun to use devices: asking for them would make it begin."""
        runtime = xla_runtime()
        return runtime is not None and runtime._xla_runtime_is_initialized()

    _initialized = property(is_initialized)  # torch's own checkpointing looks here whether there are random numbers

    def current_device(self) -> int:
        """The number of the device that "xla" without a number is."""
        return torch.device(xla_runtime()._xla_get_default_device()).index or 0

    @contextmanager
    def device(self, index: Any) -> Iterator[None]:
        """A context with this device as the current one."""
        runtime = xla_runtime()
        number = torch.device(index).index if isinstance(index, (str, torch.device)) else index
        before = runtime._xla_get_default_device()
        if number is not None and number >= 0:
            runtime._xla_set_default_device(f"xla:{number}")
        try:
            yield
        finally:
            runtime._xla_set_default_device(before)

    def get_rng_state(self, device: Any = None) -> int:
        """The seed of a device: any whole number of 64 bits without a sign."""
        return int(xla_runtime()._xla_get_rng_seed(_name_of(device)))

    def set_rng_state(self, state: int, device: Any = None) -> None:
        """Set what `get_rng_state` gave.

        Raises:
            ValueError: it is none.
        """
        if not _LEAST <= int(state) <= _MOST:
            raise ValueError(f"A seed of XLA is a whole number from {_LEAST} to {_MOST}; got {state}.")
        xla_runtime()._xla_set_rng_seed(int(state), _name_of(device))


class XlaBackend(Backend):
    """The device type "xla"."""

    def seed_rng(self, seed: int) -> None:
        self.write_rng([seed] * len(_devices()))

    def is_same_rng(self, first: Sequence[Any], second: Sequence[Any]) -> bool:
        return first == second

    def first_rng(self) -> Sequence[Any] | None:
        return [_FIRST_SEED] * MODULE.device_count()


def _devices() -> list[str]:
    return list(xla_runtime()._xla_get_devices())


def _name_of(device: Any) -> str:
    if device is None:
        return ""
    if isinstance(device, int):
        return f"xla:{device}"
    return str(device)


MODULE = DeviceModule("torch.xla", DeviceModule.__doc__)
BACKEND = XlaBackend("xla", MODULE)

if not hasattr(torch, "xla") and "torch.xla" not in sys.modules:
    register_device_module("xla", MODULE)  # torch's own checkpointing fails without one

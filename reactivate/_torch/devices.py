"""Devices beside the CPU."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from reactivate._torch.ways import fastest

_current = torch.accelerator.current_accelerator


def _is_current(ask: Any) -> bool:
    fast, public = ask(), _current()
    return (fast and fast.type) == (public and public.type)


# `torch.accelerator.current_accelerator()` without a microsecond of Python.
accelerator_device: Callable[[], torch.device | None] = fastest(
    "the current accelerator", "torch._C._accelerator_getAccelerator", probe=_is_current, public=_current
)

# What `torch.<device type>` is, for a device type that came without a module of its own.
register_device_module: Callable[[str, Any], None] = fastest(
    "registering the module of a device",
    "torch._register_device_module",
    probe=callable,
    lost="regions on XLA, with a torch_xla that registers none",
)


def xla_runtime() -> Any:
    """torch_xla's bindings, None as long as torch_xla is not imported: seeds, devices and barriers have public names only
    in part, and these initialise the runtime.
    """
    # The first half is all that most calls come to, and there are some for each region.
    return getattr(sys.modules["torch_xla"], "_XLAC", None) if "torch_xla" in sys.modules else None

"""Modules: what calling one runs besides its `forward`."""

from __future__ import annotations

import sys
from types import CodeType
from typing import Any

from torch.nn import Module
from torch.nn.modules import module as _module

# `module.__call__` runs the hooks around `forward`; a region that is a module goes inside of them.
module_call = Module.__call__
# Python frames that stand between a module's caller and its `forward`.
MODULE_CALL_CODE: CodeType | None = getattr(getattr(Module, "_call_impl", None), "__code__", None)


# Dictionaries of the hooks that run around every module, and of how those are called.
GLOBAL_FORWARD_HOOKS = _module._global_forward_pre_hooks, _module._global_forward_hooks
GLOBAL_HOOKS = *GLOBAL_FORWARD_HOOKS, _module._global_backward_pre_hooks, _module._global_backward_hooks
GLOBAL_FLAGS = _module._global_forward_hooks_with_kwargs, _module._global_forward_hooks_always_called


def has_hooks(module: Module) -> bool:
    """Return whether calling `module` runs more than its `forward`."""
    return bool(
        module._forward_pre_hooks
        or module._forward_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or any(GLOBAL_HOOKS)
    )


def are_distributed_alike(one: Any, other: Any) -> bool:
    """Return whether two tensors are DTensors of one mesh with the same placements, or no DTensors.

    Importing that class takes a second, so it is not imported for asking.
    """
    library = sys.modules.get("torch.distributed.tensor")
    if library is None:
        return True
    forms = [
        (value.device_mesh, value.placements) if isinstance(value, library.DTensor) else None for value in (one, other)
    ]
    return forms[0] == forms[1]


def is_distributed_run() -> bool:
    """Return whether this process is one of a group."""
    module = sys.modules.get("torch.distributed")
    return module is not None and module.is_available() and module.is_initialized()

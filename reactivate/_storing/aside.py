"""Storages run aside: their ops are no calls of the function whose tensors they keep."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from reactivate._passes.logs import set_aside, unseen
from reactivate._passes.oplog import OpLog
from reactivate._torch.modes import dispatch_modes, replace_dispatch_modes


def aside(function: Callable[..., Any], *args: Any) -> Any:
    """`function(*args)`, seen by no log of calls or of ops, by no function mode of the user's, and not by autograd."""
    return unseen(_unlogged, function, args)


def _unlogged(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    modes = dispatch_modes()
    is_logged = any(isinstance(mode, OpLog) for mode in modes)
    if is_logged:
        replace_dispatch_modes(tuple(mode for mode in modes if not isinstance(mode, OpLog)))
    try:
        with set_aside(), torch.no_grad():
            return function(*args)
    finally:
        if is_logged:
            replace_dispatch_modes(modes)

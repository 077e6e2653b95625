"""Storages run aside: their ops are no calls of the function whose tensors they keep."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from reactivate._passes.logs import set_aside, unseen
from reactivate._passes.oplog import OpLog
from reactivate._torch.modes import dispatch_modes, is_dispatch_mode_active, replace_dispatch_modes


def aside(function: Callable[..., Any], *args: Any) -> Any:
    """`function(*args)`, seen by no log of calls or of ops, by no function mode of the user's, and not by autograd."""
    return unseen(_unlogged, function, args)


def _unlogged(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    with set_aside(), torch.no_grad():
        return _without_logs_of_ops(function, args)


def _without_logs_of_ops(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    if not is_dispatch_mode_active():
        return function(*args)
    modes = dispatch_modes()
    replace_dispatch_modes(tuple(mode for mode in modes if not isinstance(mode, OpLog)))
    try:
        return function(*args)
    finally:
        replace_dispatch_modes(modes)

"""Storages run aside: their ops are no calls of the function whose tensors they keep."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from reactivate._passes.logs import set_aside, unseen


def aside(function: Callable[..., Any], *args: Any) -> Any:
    """`function(*args)`, seen by no log of calls or of ops, by no mode of the user's, and not by autograd."""
    return unseen(_unlogged, function, args)


def _unlogged(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    with set_aside(), torch.no_grad():
        return function(*args)

"""Copies of a tensor from a device to the host, such as those of split sizes for an all-to-all.

A name is not enough for them: `to` also casts and moves in other directions. So a policy is asked about each call.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

OPS = frozenset({"to", "cpu", "_to_copy"})


def is_copy_to_host(op: str | None, args: Any, kwargs: Any) -> bool:
    """Return whether a call of an op copies a tensor from a device to the host."""
    if op not in OPS or not args or not isinstance(args[0], Tensor) or not _is_on_device(args[0]):
        return False
    return op == "cpu" or any(map(_names_host, (*args[1:2], kwargs.get("device"), kwargs.get("other"))))


def _is_on_device(tensor: Tensor) -> bool:
    return tensor.device.type != "cpu"


def _names_host(target: Any) -> bool:
    if isinstance(target, Tensor):
        return target.device.type == "cpu"
    if isinstance(target, torch.device):
        return target.type == "cpu"
    return isinstance(target, str) and torch.device(target).type == "cpu"

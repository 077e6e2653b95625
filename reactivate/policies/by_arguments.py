"""Calls for which the name of the op is not enough, so that a policy is asked about each: their arguments tell what they are.

Copies of a tensor from a device to the host, such as those of split sizes for an all-to-all: `to` also casts and moves in
other directions. And attention that runs as many ops instead of one kernel: to save such a call is to save what each of
these ops saves; the same function calls one kernel, if there is one for its arguments.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_COPIES, _ATTENTION = frozenset({"to", "cpu", "_to_copy"}), frozenset({"scaled_dot_product_attention"})
OPS = _COPIES | _ATTENTION


def is_copy_to_host(op: str | None, args: Any, kwargs: Any) -> bool:
    """Return whether a call of an op copies a tensor from a device to the host."""
    if op not in _COPIES or not args or not isinstance(args[0], Tensor) or not _is_on_device(args[0]):
        return False
    return op == "cpu" or any(map(_names_host, (*args[1:2], kwargs.get("device"), kwargs.get("other"))))


def _is_on_device(tensor: Tensor) -> bool:
    return tensor.device.type != "cpu"


def _names_host(target: Any) -> bool:
    device = target.device if isinstance(target, Tensor) else target
    return isinstance(device, (str, torch.device)) and torch.device(device).type == "cpu"


def is_unfused(op: str | None, args: Any, kwargs: Any) -> bool:
    """Return whether a call of an op is attention with dropout on a CPU, which has no kernel for that."""
    if op not in _ATTENTION:
        return False
    query = args[0] if args else kwargs.get("query")
    dropout = args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0)
    return bool(dropout) and getattr(getattr(query, "device", None), "type", None) == "cpu"

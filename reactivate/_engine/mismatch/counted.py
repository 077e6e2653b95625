"""Ops under a dispatch mode, with the versions that they move without one.

Torch's in-place foreach ops move the versions of their tensors, but not while a dispatch mode is on: a write that is seen
in one pass would be unseen in the other.
"""

from __future__ import annotations

from typing import Any

from torch.autograd.graph import increment_version


def call_counted(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
    """Call an op from a dispatch mode."""
    name = func.overloadpacket.__name__
    if not (name.startswith("_foreach") and name.endswith("_")):
        return func(*args, **(kwargs or {}))
    before = [(tensor, tensor._version) for tensor in args[0] if not tensor.is_inference()]
    result = func(*args, **(kwargs or {}))
    increment_version([tensor for tensor, version in before if tensor._version == version])
    return result

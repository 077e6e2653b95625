"""Nested containers of tensors, those of libraries too."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree

# Container types that a library registered with torch: {type: (flatten_fn, unflatten_fn, ...)}.
registered_containers: dict[type, Any] = _pytree.SUPPORTED_NODES


def leaves_with_paths(value: Any) -> list[tuple[str, Any]]:
    """List what is in nested containers, with the way to it: "[0]['hidden']"."""
    return [(_pytree.keystr(path), leaf) for path, leaf in _pytree.tree_leaves_with_path(value)]


def flatten(value: Any) -> tuple[list[Any], Any]:
    """Return what is in nested containers, and what `unflatten` needs to put it back."""
    if isinstance(value, torch.Tensor):  # as mostly
        return [value], None
    return _pytree.tree_flatten(value)


def leaves_at_op(value: Any) -> list[Any]:
    """List what an op takes or returns, which lies in lists, tuples and dicts alone: `flatten` takes ten times as long."""
    found: list[Any] = []
    _collect(value, found)
    return found


def _collect(value: Any, found: list[Any]) -> None:
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (tuple, list)):
        value = (value,)
    for item in value:
        if isinstance(item, (tuple, list, dict)):
            _collect(item, found)
        elif item is not None:
            found.append(item)


def unflatten(leaves: list[Any], structure: Any) -> Any:
    """The opposite of `flatten`."""
    return leaves[0] if structure is None else _pytree.tree_unflatten(leaves, structure)

"""Saved tensors of the nodes of a graph, and something else in the place of one, after the op has saved it.

Nodes show them as attributes that begin with `_raw_saved_`, which torch has no other name for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

Rebuild = Callable[[], Tensor]


def nodes_since(tensor: Tensor, first: Any) -> Iterator[Any]:
    """Go through the nodes from the one that made `tensor` back to those that are no older than `first`, each once."""
    oldest = first._sequence_nr()
    seen: set[Any] = set()
    todo: list[Any] = [tensor.grad_fn]
    while todo:
        node = todo.pop()
        if node is None or node in seen or node._sequence_nr() < oldest:
            continue
        seen.add(node)
        yield node
        todo += [following for following, _ in node.next_functions]


def saved_by(node: Any) -> list[Any]:
    """Return what a node has saved, as torch's `SavedTensor`s."""
    found: list[Any] = []
    for name in dir(node):
        if name.startswith("_raw_saved_"):
            saved = getattr(node, name)
            found += saved if isinstance(saved, (tuple, list)) else [saved]
    return [saved for saved in found if saved is not None]


def replace_saved(saved: Any, rebuild_of: Callable[[Tensor], Rebuild | None]) -> bool:
    """Let a saved tensor be rebuilt when it is read; return whether it is.

    Args:
        saved: a `SavedTensor`. What saved-tensor hooks have packed stays as it is.
        rebuild_of: tensor -> a function that makes it again, or None if it is to be kept.
    """
    if not hasattr(saved, "unpack_hook"):  # torch before 2.12 does not show what is saved, but to a hook
        return _replace_blindly(saved, rebuild_of)
    tensor = None if saved.unpack_hook is not None else saved.data
    rebuild = None if tensor is None else rebuild_of(tensor)
    if rebuild is None:
        return False
    saved.register_hooks(lambda _: rebuild, _call)
    return True


def _call(rebuild: Rebuild) -> Tensor:
    return rebuild()


def _replace_blindly(saved: Any, rebuild_of: Callable[[Tensor], Rebuild | None]) -> bool:
    asked: list[Any] = [rebuild_of]  # the node holds `pack` as long as it lives, which must not hold the tensors
    packed: list[bool] = []

    def pack(tensor: Tensor) -> Any:
        rebuild = asked.pop()(tensor)
        packed.append(rebuild is not None)
        return rebuild or (tensor, tensor._version)

    try:
        saved.register_hooks(pack, _unpack)
    except RuntimeError:  # there are hooks already, or nothing was saved
        return False
    return packed[0]


def _unpack(packed: Any) -> Tensor:
    if callable(packed):
        return packed()  # type: ignore[no-any-return]
    tensor, version = packed
    if tensor._version != version:  # a hook turns autograd's own check off
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"{torch.typename(tensor)} {list(tensor.shape)} is at version {tensor._version}; expected version {version}"
        )
    return tensor

"""Ops of the simulated accelerator: the shapes of what they return, what they write to, and how they run on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor


def run_op(op: Any, args: Any, kwargs: Any, seed: int | None) -> Any:
    if seed is None:
        return op(*args, **kwargs)
    before = torch.default_generator.get_state()
    torch.default_generator.manual_seed(seed)
    try:
        return op(*args, **kwargs)
    finally:
        torch.default_generator.set_state(before)


def write_to(targets: list[Any], values: list[Any]) -> None:
    for target, value in zip(targets, values):
        if target is not None and target.data_ptr() != value.data_ptr():
            target.copy_(value)


def leaves_of(value: Any) -> Iterator[Any]:
    if isinstance(value, (tuple, list)):
        for item in value:
            yield from leaves_of(item)
    elif isinstance(value, dict):
        yield from leaves_of(list(value.values()))
    else:
        yield value


def map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        items = [map_leaves(function, item) for item in value]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, dict):
        return {key: map_leaves(function, item) for key, item in value.items()}
    return function(value)


_known_shapes: dict[Any, Any] = {}


def shapes_of(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, list[Any]] | None:
    """Return what `op` returns and what it writes to as meta tensors; None if these do not do."""

    def signature(leaf: Any) -> Any:
        return (leaf.shape, leaf.stride(), leaf.dtype) if isinstance(leaf, Tensor) else (type(leaf), leaf)

    key = (op, torch.get_default_dtype(), repr(map_leaves(signature, (args, kwargs))))
    if key not in _known_shapes:
        meta_args, meta_kwargs = map_leaves(_to_meta, (args, kwargs))
        try:
            results = op(*meta_args, **meta_kwargs)
        except (NotImplementedError, RuntimeError):
            _known_shapes[key] = None
        else:
            _known_shapes[key] = results, written_by(op, meta_args, meta_kwargs)
    return _known_shapes[key]


def _to_meta(leaf: Any) -> Any:
    if isinstance(leaf, torch.device):
        return torch.device("meta")
    if not isinstance(leaf, Tensor):
        return leaf
    return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")


def is_written(one: Any) -> bool:
    return one.alias_info is not None and one.alias_info.is_write


def written_by(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Return the arguments that `op` writes to."""
    given = dict(zip((one.name for one in op._schema.arguments), args)) | kwargs
    return [given.get(one.name) for one in op._schema.arguments if is_written(one)]

"""Hooks on tensors: a recomputation has those that its forward began with, and what it registers goes when it ends."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, repeat
from operator import attrgetter
from typing import Any

from torch import Tensor

from reactivate._torch.autograd import give_hooks

Hooks = Sequence[tuple[dict[int, Any], ...]]
"""Copies of the dicts of each tensor's hooks; shorter than the tensors where there are none from some on."""

_HOOKS = attrgetter("_backward_hooks", "_post_accumulate_grad_hooks")  # dicts, or None
_NONE: tuple[dict[int, Any], ...] = ({}, {})


def hooks_on(tensors: Sequence[Tensor]) -> Hooks:
    """Copy the hooks on tensors: () if there are none, as mostly."""
    if not _are_any(tensors):
        return ()
    return [tuple({} if item is None else dict(_items(item)) for item in pair) for pair in map(_HOOKS, tensors)]


def _are_any(tensors: Sequence[Tensor]) -> bool:
    for tensor in tensors:  # noqa: SIM110  in half the time of `any`
        if tensor._backward_hooks or tensor._post_accumulate_grad_hooks:
            return True
    return False


def are_same_hooks(hooks: Hooks, others: Hooks) -> bool:
    """Return whether these are the same hooks on the same tensors."""
    count = max(len(hooks), len(others))
    rows = zip(_endless(hooks), _endless(others), range(count))
    return all([*map(_items, one)] == [*map(_items, other)] for one, other, _ in rows)


def put_hooks_on(tensors: Sequence[Tensor], hooks: Hooks) -> None:
    """Let the tensors have these hooks, and no others."""
    if not hooks and not _are_any(tensors):
        return
    for tensor, pair in zip(tensors, _endless(hooks)):
        now, wanted = _HOOKS(tensor), pair[0]
        if now[0] is None and wanted:  # the tensor stands in for the one that had them
            give_hooks(tensor, wanted)
        for present, noted in zip(now, pair):
            if present is not None and _items(present) != _items(noted):
                present.clear()
                present.update(noted)


def _items(hooks: dict[int, Any]) -> list[tuple[int, Any]]:
    """List hooks in the order in which autograd calls them: that of the dict, whatever an `OrderedDict` makes of it."""
    return [*dict.items(hooks)]


def _endless(hooks: Hooks) -> chain[tuple[dict[int, Any], ...]]:
    return chain(hooks, repeat(_NONE))

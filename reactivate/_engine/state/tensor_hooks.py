"""Hooks on tensors: what a recomputation registers is taken away again, so that each fires once (Rule 21)."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

from torch import Tensor

_BACKWARD, _ACCUMULATED = attrgetter("_backward_hooks"), attrgetter("_post_accumulate_grad_hooks")


class KeptHooks:
    """Tensors that have the hooks after the context that they had before it."""

    __slots__ = ("_before", "_tensors")

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors

    def __enter__(self) -> None:
        hooks: list[Any] = [*map(_BACKWARD, self._tensors), *map(_ACCUMULATED, self._tensors)]
        self._before = [None if item is None else dict(item) for item in hooks] if any(hooks) else None

    def __exit__(self, *error: object) -> None:
        hooks: list[Any] = [*map(_BACKWARD, self._tensors), *map(_ACCUMULATED, self._tensors)]
        if any(hooks):
            for now, before in zip(hooks, self._before or [None] * len(hooks)):
                if now is not None and dict(now) != (before or {}):
                    now.clear()
                    now.update(before or {})

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
        self._before = [None if item is None else dict(item) for item in self._hooks()] if self._has_hooks() else None

    def __exit__(self, *error: object) -> None:
        if self._before is not None or self._has_hooks():
            hooks = self._hooks()
            for now, before in zip(hooks, self._before or [None] * len(hooks)):
                if now is not None and dict(now) != (before or {}):
                    now.clear()
                    now.update(before or {})

    def _has_hooks(self) -> bool:
        return any(map(_BACKWARD, self._tensors)) or any(map(_ACCUMULATED, self._tensors))

    def _hooks(self) -> list[Any]:
        return [*map(_BACKWARD, self._tensors), *map(_ACCUMULATED, self._tensors)]

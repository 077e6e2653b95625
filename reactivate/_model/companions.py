"""Schedulers of learning rates and gradient scalers that a step can reach, as they are before it."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from typing import Any

from torch.amp import GradScaler
from torch.optim.lr_scheduler import LRScheduler

KINDS = (LRScheduler, GradScaler)


class Companions:
    """Their state: what belongs to them alone, such as counts, rates and scales.

    Args:
        found: schedulers and scalers. Those that a scheduler consists of are found in it.

    Attributes:
        optimizers: those that schedulers write learning rates to.

    Raises:
        TypeError: one of them has an attribute that cannot be copied.
    """

    def __init__(self, found: Iterable[Any]) -> None:
        items = {id(item): item for each in found for item in _with_parts(each)}
        self.optimizers = [vars(item)["optimizer"] for item in items.values() if "optimizer" in vars(item)]
        self._shared = {id(item): item for item in (*items.values(), *self.optimizers)}
        self._content = [(item, self._copied(vars(item))) for item in items.values()]

    def put_back(self) -> None:
        """Let them be as they were."""
        for item, content in self._content:
            vars(item).clear()
            vars(item).update(self._copied(content))

    def _copied(self, content: dict[str, Any]) -> dict[str, Any]:
        return copy.deepcopy(content, dict(self._shared))


def _with_parts(item: Any) -> Iterator[Any]:
    yield item
    for part in vars(item).get("_schedulers", ()):  # of `SequentialLR` and `ChainedScheduler`
        yield from _with_parts(part)

"""The numbers of the calls of a unit in a forward of the model, as `_model.by_call` counts them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from torch import is_grad_enabled
from torch.nn import Module


class CallKey(NamedTuple):
    """The calls of a unit that have one treatment.

    Attributes:
        path: the unit.
        number: theirs in each forward; 0 for all calls; None for those without gradients, which have no treatment.
    """

    path: str
    number: int | None


def keys_of(paths: Sequence[str], numbers: Sequence[int | None], uncounted: Collection[str]) -> Iterator[CallKey]:
    """Yield what decides about each call of a step.

    Args:
        paths, numbers: of its calls, in order.
        uncounted: the units of which some call with gradients has no number.
    """
    for path, number in zip(paths, numbers, strict=True):
        yield CallKey(path, 0 if path in uncounted else number)


class CallNumbers:
    """Counts the calls of units.

    Args:
        model: the model in whose forwards they are counted.

    Attributes:
        uncounted: the units that were called outside of these.
    """

    def __init__(self, model: Module | None) -> None:
        self.uncounted: set[str] = set()
        self._model = model
        self._depth = 0
        self._counts: Counter[str] = Counter()

    def begins(self, module: Module) -> None:
        """A module is called."""
        if module is self._model:
            self._depth += 1
            if self._depth == 1:
                self._counts.clear()

    def ends(self, module: Module) -> None:
        """A module has returned, or raised."""
        if module is self._model:
            self._depth -= 1

    def next(self, path: str) -> int | None:
        """Return the number of a call of a unit; None if it has none."""
        if not is_grad_enabled():
            return None
        if not self._depth:
            self.uncounted.add(path)
            return None
        self._counts[path] += 1
        return self._counts[path] - 1

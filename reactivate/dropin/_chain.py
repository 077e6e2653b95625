"""Chains of functions, cut into segments as `checkpoint_sequential` does."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from torch.nn import Sequential

from reactivate.errors import UsageError

_Part = Callable[[Any], Any]


def segments_of(functions: Sequential | Sequence[Callable[..., Any]], segments: int) -> tuple[list[_Part], _Part]:
    """Return the segments of a chain that are to be checkpointed, and the last one, which is not.

    Raises:
        UsageError: `segments` is not a number from 1 to the number of functions.
    """
    chain = list(functions.children()) if isinstance(functions, Sequential) else list(functions)
    if isinstance(segments, bool) or not isinstance(segments, int) or not 1 <= segments <= max(1, len(chain)):
        raise UsageError(
            f"segments={segments!r}: it has to be a whole number from 1 to {max(1, len(chain))}, how many functions "
            "there are."
        )
    size = len(chain) // segments
    starts = range(0, size * (segments - 1), size)
    parts: list[_Part] = [functools.partial(_run_chain, chain[start : start + size]) for start in starts]
    return parts, functools.partial(_run_chain, chain[size * (segments - 1) :])


def _run_chain(chain: Sequence[Callable[..., Any]], value: Any) -> Any:
    for function in chain:
        value = function(value)
    return value

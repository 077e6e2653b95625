"""Iterators: copied, since a function that goes on with one uses it up."""

from __future__ import annotations

import copy
import functools
from types import GeneratorType
from typing import Any


@functools.cache
def is_iterator(kind: type) -> bool:
    """Return whether objects of this class are iterators that can be copied."""
    is_known = kind.__module__ in ("builtins", "itertools", "collections") and kind is not GeneratorType
    return is_known and hasattr(kind, "__next__")


def copied(iterator: Any) -> Any:
    """Return an iterator that goes on from where this one is. One made of others (`zip`) is copied with these."""
    if not isinstance(iterator, (zip, map, enumerate, filter)):
        return copy.copy(iterator)
    made, arguments = iterator.__reduce__()[:2]  # type: ignore[misc]
    return made(*[copied(item) if is_iterator(type(item)) else item for item in arguments])

"""Objects that something is known of, by their identity, for as long as they live."""

from __future__ import annotations

import functools
from typing import Any
from weakref import ref


class Known(dict[int, "ref[Any]"]):
    """A set of objects that are held weakly: a `WeakSet` would compare tensors by their elements.

    It is a dict, by the objects' ids, for mostly it is empty, and that is asked for every region.
    """

    def note(self, item: Any) -> None:
        """Add an object."""
        key = id(item)
        self[key] = ref(item, functools.partial(self.pop, key))

    def has(self, item: Any) -> bool:
        """Return whether this very object was added."""
        reference = self.get(id(item)) if self else None
        return reference is not None and reference() is item

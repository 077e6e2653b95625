"""Identities of regions, and what code keeps under them: entries of dicts that belong to one call and are not rewound.

A module that keeps state of its own for recomputations (the scale of that call, say) leaves it in a dict under the identity
of the region. The recomputation has to find there what its forward left, so that no note holds such an entry.
"""

from __future__ import annotations

from typing import Any
from weakref import ReferenceType, WeakSet


class RegionCall:
    """The identity of one call of a checkpointed function: the same object in its forward and in its recomputations.

    It can be a key, also of a `WeakKeyDictionary`, and lives as long as the region does.
    """

    __slots__ = ("__weakref__", "_inner")
    _inner: dict[int, RegionCall]  # set when the first is asked for: one of these is made for every region

    def inner(self, index: int) -> RegionCall:
        """Return the identity of the region that begins inside of this one after `index` others."""
        try:
            inner = self._inner
        except AttributeError:
            inner = self._inner = {}
        if index not in inner:
            inner[index] = RegionCall()
        return inner[index]


handed_out: WeakSet[RegionCall] = WeakSet()  # that may be a key: mostly none, and then there is no need to look further


def is_of_call(key: Any) -> bool:
    """Return whether a dict's entry with this key belongs to a region: its identity, one in a tuple, or a reference to it."""
    if type(key) is tuple:
        return any(map(is_of_call, key))
    if isinstance(key, ReferenceType):
        key = key()
    return type(key) is RegionCall

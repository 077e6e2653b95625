"""Places: the lines of the user's code at which a region's tensors were saved.

To look for the innermost line of the user's around every op costs more than the rest of what a saved tensor costs, where
the op is deep inside of a library. So a region notes the instruction that saves, and looks further out only in the calls
that are compared anyway. What was found then is remembered for each instruction and position, for messages of later calls.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple
from weakref import ref

from reactivate._engine.sites import Site
from reactivate._engine.state.bounded import Bounded


class SavePlace(NamedTuple):
    """The place at which one tensor was saved.

    Attributes:
        inner: the instruction that saves, often one of torch's.
        users: the innermost one of the user's.
    """

    inner: Site
    users: Site


Places = dict[int, SavePlace]
"""By the number of the saved tensor."""

# By the ids of the regions' owners. Bounded, for a place knows code: mostly the owner itself.
_known: Bounded[int, tuple[ref[Any], Places]] = Bounded()


def are_known(owner: Any) -> bool:
    """Return whether the places of an earlier call are remembered."""
    entry = _known.get(id(owner))
    return entry is not None and entry[0]() is owner


def remember(owner: Any, places: Places) -> None:
    """Remember the places of one call, for as long as the owner of the region lives."""
    key = id(owner)
    try:
        _known[key] = ref(owner, functools.partial(_known.pop, key)), places
    except TypeError:  # an object in C, of which nobody learns that it has gone
        return


def users_site(owner: Any, number: int, inner: Site) -> Site:
    """Return where in the user's code this tensor was saved, or `inner` if that is not known."""
    if not are_known(owner):
        return inner
    place = _known[id(owner)][1].get(number)
    return place.users if place is not None and place.inner == inner else inner

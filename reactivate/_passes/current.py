"""The region that is running, and whether it runs in its forward or in a recomputation."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from reactivate._snapshot.region_calls import RegionCall, handed_out

Running = tuple[RegionCall, int, bool]
"""A region that is running, how many regions have begun inside of it by now, and whether it runs in a recomputation."""

_here: ContextVar[Running | None] = ContextVar("reactivate.current_region", default=None)
running_now: Callable[[], Running | None] = _here.get
"""Return the region that is running, and how many regions have begun inside of it by now."""


def is_recomputed() -> bool:
    """Return whether the calling code, which is ours, runs in a recomputation."""
    here = _here.get()
    return here is not None and here[2]


def current_region() -> RegionCall | None:
    """Return the identity of the innermost region that the calling code runs in: None outside of regions (Rule 27).

    It is the same object in the forward of a call and in its recomputations, and another one for each call. So a module
    that keeps state of its own for recomputations keeps it under this key, in a `weakref.WeakKeyDictionary`: the entry goes
    with the region, also if the forward fails or no backward follows. A recomputation does not rewind the entries of a dict
    whose key is an identity, or a tuple with one in it. Buffers and attributes need none of this: they are rewound.

    Examples:
        >>> import torch, reactivate
        >>> from weakref import WeakKeyDictionary
        >>> scales = WeakKeyDictionary()
        >>> def f(x):
        ...     region = reactivate.current_region()
        ...     if not reactivate.is_recomputing():
        ...         scales[region] = x.detach().abs().amax()
        ...     return (x / scales[region]).sin()
        >>> out = reactivate.checkpoint(f)(torch.ones(2, requires_grad=True)).sum()
        >>> len(scales)
        1
        >>> out.backward(); del out
        >>> len(scales)
        0
    """
    here = _here.get()
    if here is None:
        return None
    handed_out.add(here[0])
    return here[0]


NOT_ENTERED: Any = object()
"""What the `outer` of a region is before its forward begins, and when it is over."""


def enter_region(record: Any) -> None:
    """A forward begins: give `record` its `identity`, and as `outer` what `leave_region` takes.

    The record has both before the forward is what runs here, so that an interrupt at any moment leaves who can leave it.
    """
    here, is_again = _here.get(), False
    if here is None:
        record.identity = RegionCall()
    else:
        outer, index, is_again = here
        record.identity, here = outer.inner(index), (outer, index + 1, is_again)
    record.outer = here
    _here.set((record.identity, 0, is_again))


def leave_region(record: Any) -> None:
    """The forward of `record` is over, if it has begun and is not over yet."""
    if record.outer is not NOT_ENTERED:
        _here.set(record.outer)
        record.outer = NOT_ENTERED


def go_on_at(place: Running) -> None:
    """Count the regions that began by then: a recomputation leaves out a call that they were inside of."""
    here = _here.get()
    _here.set((place[0], place[1], here is not None and here[2]))


def enter_recomputation(region: RegionCall) -> None:
    """A recomputation begins, in a context of its own, which ends with it."""
    _here.set((region, 0, True))

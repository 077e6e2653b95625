"""The lines of the user's code that call ops and save tensors, found cheaply enough to note them for every saved tensor.

A location is a code object and an instruction in it; the line is looked up for a message. To look for the innermost line of
the user's around every op costs more than the rest of what a saved tensor costs, where the op is deep inside of a library.
So a region notes the instruction that saves, and looks further out only in the calls that are compared anyway. What was found
then is remembered for each instruction and position, for messages of later calls.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch.nn import Module

from reactivate._snapshot.caches import BoundedCache
from reactivate._torch.modules import MODULE_CALL_CODE

CodeLocation = tuple[CodeType, int]

_LIBRARIES = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(os.path.dirname(__file__)) + os.sep)


# Whether code is torch's or ours, and whether it calls the function of a region, by the id of the code object: with the
# object, so that the id stays its own.
_known: BoundedCache[int, tuple[bool, bool, CodeType]] = BoundedCache()
_callers: set[int] = set()  # by the id of the code, which is ours and stays: to hash code is slow


def calls_regions(code: CodeType) -> None:
    """Note that this code of ours calls the function of a region: what is further out is not inside of it."""
    _callers.add(id(code))


def user_frame(frame: FrameType) -> FrameType:
    """The innermost frame outside of torch and of this package, or `frame` if there is none."""
    return user_frame_inside(frame)[0]


def user_frame_inside(frame: FrameType) -> tuple[FrameType, bool]:
    """Return what `user_frame` does, and whether that frame is inside of the region that is running.

    Not of the caller's own frame: a device's thread has no frame of the user's, and who holds its own frame holds all in it.
    """
    found: FrameType | None = frame
    is_inside = True
    while found is not None:
        code = found.f_code
        is_library, calls_region, _ = _known.get(id(code)) or _facts_of(code)
        if not is_library:
            return found, is_inside
        if calls_region:
            is_inside = False
        found = found.f_back
    return frame, False


def _facts_of(code: CodeType) -> tuple[bool, bool, CodeType]:
    known = _known[id(code)] = code.co_filename.startswith(_LIBRARIES), id(code) in _callers, code
    return known


def line_of(site: CodeLocation) -> str:
    """`file:line in function`."""
    code, instruction = site
    line: int | None = code.co_firstlineno
    for start, end, number in code.co_lines():
        if start <= instruction < end and number is not None:
            line = number
    return f"{code.co_filename}:{line} in {qualified_name(code)}"


def qualified_name(code: CodeType) -> str:
    """`Class.function` (Python 3.10 knows only `function`)."""
    return getattr(code, "co_qualname", code.co_name)


def modules_around(frame: FrameType | None) -> Iterator[Module]:
    """Yield the modules whose calls a frame is inside of, the innermost first."""
    while frame is not None:
        if frame.f_code is MODULE_CALL_CODE:
            yield frame.f_locals["self"]
        frame = frame.f_back


class SavePlace(NamedTuple):
    """The place at which one tensor was saved.

    Attributes:
        inner: the instruction that saves, often one of torch's.
        users: the innermost one of the user's.
    """

    inner: CodeLocation
    users: CodeLocation


Places = dict[int, SavePlace]
"""By the number of the saved tensor."""

# By the ids of the regions' owners. BoundedCache, for a place knows code: mostly the owner itself.
_places: BoundedCache[int, tuple[ref[Any], Places]] = BoundedCache()


def are_known(owner: Any) -> bool:
    """Return whether the places of an earlier call are remembered."""
    entry = _places.get(id(owner))
    return entry is not None and entry[0]() is owner


def remember(owner: Any, places: Places) -> None:
    """Remember the places of one call, for as long as the owner of the region lives."""
    key = id(owner)
    try:
        _places[key] = ref(owner, functools.partial(_places.pop, key)), places
    except TypeError:  # an object in C, of which there is no way to learn that it has gone
        return


def users_site(owner: Any, number: int, inner: CodeLocation) -> CodeLocation:
    """Return where in the user's code this tensor was saved, or `inner` if that is not known."""
    if not are_known(owner):
        return inner
    place = _places[id(owner)][1].get(number)
    return place.users if place is not None and place.inner == inner else inner

"""Where in the user's code an op was called, cheaply enough to note it for every saved tensor.

A site is a code object and an instruction in it; the line is looked up when somebody asks.
"""

from __future__ import annotations

import os
from types import CodeType, FrameType
from typing import NamedTuple

import torch
from torch.nn import Module

Site = tuple[CodeType, int]

_LIBRARIES = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(os.path.dirname(__file__)) + os.sep)


class KnownCode(NamedTuple):
    """What is known of a code object.

    Attributes:
        is_library: whether it is torch's or ours.
        is_forward: whether it is the `forward` of one of torch's modules, which `Module.__call__` calls.
    """

    is_library: bool
    is_forward: bool


USERS = KnownCode(False, False)  # as mostly: one object for all, to be known by its identity
known_code: dict[int, KnownCode] = {}  # by the id of the code object
_kept: list[CodeType] = []  # so that their ids stay their own


def user_frame(frame: FrameType) -> FrameType:
    """The innermost frame outside of torch and of this package, or `frame` if there is none."""
    found: FrameType | None = frame
    while found is not None:
        code = found.f_code
        if not (known_code.get(id(code)) or look_at(code)).is_library:
            return found
        found = found.f_back
    return frame


def look_at(code: CodeType) -> KnownCode:
    """What is to be known of `code`, from now on in `known_code`."""
    is_library = code.co_filename.startswith(_LIBRARIES)
    known = KnownCode(is_library, is_library and code.co_name == "forward")
    _kept.append(code)
    return known_code.setdefault(id(code), USERS if known == USERS else known)


def line_of(site: Site) -> str:
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


def called_module(frame: FrameType) -> Module | None:
    """The innermost module whose method is running in `frame` or around it."""
    found: FrameType | None = frame
    while found is not None:
        owner = found.f_locals.get("self")
        if isinstance(owner, Module):
            return owner
        found = found.f_back
    return None

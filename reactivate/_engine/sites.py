"""Where in the user's code an op was called, cheaply enough to note it for every saved tensor.

A site is a code object and an instruction in it; the line is looked up when somebody asks.
"""

from __future__ import annotations

import os
from types import CodeType, FrameType

import torch
from torch.nn import Module

Site = tuple[CodeType, int]

_LIBRARIES = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(os.path.dirname(__file__)) + os.sep)
# Ops that fill a tensor after they had it saved: to be cut short there would leave it unfilled.
_FILL_WHAT_THEY_SAVED = frozenset({"rrelu", "rrelu_", "rrelu_with_noise"})

# By the id of the code object: whether it is torch's or ours, whether it calls such an op, and the code object itself,
# which is kept so that its id stays its own.
known_code: dict[int, tuple[bool, bool, CodeType]] = {}


def user_frame(frame: FrameType) -> FrameType:
    """The innermost frame outside of torch and of this package, or `frame` if there is none."""
    found: FrameType | None = frame
    while found is not None and is_library(found.f_code):
        found = found.f_back
    return frame if found is None else found


def is_library(code: CodeType) -> bool:
    """Whether `code` is torch's or ours."""
    return (known_code.get(id(code)) or look_at(code))[0]


def look_at(code: CodeType) -> tuple[bool, bool, CodeType]:
    """What is to be known of `code`, from now on in `known_code`."""
    fills = not _FILL_WHAT_THEY_SAVED.isdisjoint(code.co_names)
    known = known_code[id(code)] = (code.co_filename.startswith(_LIBRARIES), fills, code)
    return known


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

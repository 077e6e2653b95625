"""The page about the life of a region: every file and function that it names is there, and a call goes through them."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from functools import partial
from operator import attrgetter
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from several import check_each
from torch import nn

import reactivate
from reactivate._region.region import Region
from reactivate._torch.autograd import FUNCTION_APPLY_CODE

PAGE = (Path(__file__).parents[2] / "docs" / "life-of-a-region.md").read_text(encoding="utf-8")
STEPS = re.split(r"^### (\d+)\. .*$", PAGE.partition("\n## Questions")[0], flags=re.MULTILINE)


def named_in(text: str) -> Iterator[tuple[str, str]]:
    """The (file, name) pairs: a file in backquotes, and behind it names of what is in it."""
    for files in re.findall(r"`(?:\w+/)*\w+\.py` `[\w.]+`(?:, `[\w.]+`)*", text):
        file, *names = re.findall(r"`([^`]+)`", files)
        yield from ((file, name) for name in names)


def found(file: str, name: str) -> Any:
    return attrgetter(name)(importlib.import_module("reactivate." + file.removesuffix(".py").replace("/", ".")))


def test_what_the_page_names_is_there() -> None:
    check_each({" ".join(named): partial(found, *named) for named in named_in(PAGE)})


def test_the_page_has_ten_steps_with_code() -> None:
    assert STEPS[1::2] == [str(number) for number in range(1, 11)]
    for text in STEPS[2::2]:
        [code] = [part for part in text.split("\n\n") if part.startswith("Code: ")]
        assert list(named_in(code)), text


def test_a_warm_call_goes_through_the_steps_in_their_order() -> None:
    path = [
        (file, name, found(file, name).__code__)
        for part in PAGE.split("\n\n")
        if part.startswith("Code: ")
        for file, name in named_in(part)
    ]
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    region = reactivate.checkpoint(lambda x, *, scale: (net(x) * scale).exp())

    def step() -> None:
        x, scale = torch.randn(3, 4, requires_grad=True), torch.ones(4, requires_grad=True)
        region(x, scale=scale).sum().backward()

    for _ in range(2):  # the 1st and the 2nd call are compared, the 3rd is not
        step()
    calls: list[CodeType] = []

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            calls.append(frame.f_code)

    sys.setprofile(profile)
    try:
        step()
    finally:
        sys.setprofile(None)
    position = 0
    unpack, unpack_slot = Region.unpack.__code__, Region.unpack_slot.__code__
    if FUNCTION_APPLY_CODE is None:  # there each tensor goes the way of those that may be read again
        path = [(file, name, unpack_slot if code is unpack else code) for file, name, code in path]
    for file, name, code in path:
        assert code in calls[position:], f"{file} {name} does not run where the page says"
        position = calls.index(code, position)
    assert len(path) >= 20

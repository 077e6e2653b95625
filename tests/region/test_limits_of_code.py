"""Limits of code: what it reads where nothing is compared, and changes between forward and backward."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import code_read_from_afar
import pytest
import torch
from code_read_by_programs import reads_from_afar
from limit_cases import Fn, leaf, plain, shows, torchs
from torch import Tensor, nn

import reactivate


class Coded(nn.Module):
    functions: dict[str, Fn] = {"size": lambda size=1.0: size}

    def __init__(self) -> None:
        super().__init__()
        self.made = made

    def forward(self, x: Tensor) -> Tensor:
        scale = self.read() * self.functions["size"]() * self.made.size
        late = getattr(code_read_from_afar, "late", 1.0)
        return (x * scale * reads_from_afar() * math.e * late).sin()

    def read(self, scale: float = 1.0) -> float:
        return scale


made = ModuleType("made")
made.size = 1.0  # type: ignore[attr-defined]


def another_default_of_a_method(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Coded.read, "__defaults__", (5.0,))


def another_default_in_a_container(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Coded.functions["size"], "__defaults__", (5.0,))


def another_value_in_a_python_module_that_is_an_attribute(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Coded().made, "size", 5.0)


def another_value_that_is_read_by_getattr(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(code_read_from_afar, "late", 5.0, raising=False)


def another_value_two_python_modules_away(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(code_read_from_afar, "scale", 5.0)


def another_constant_of_a_library(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(math, "e", 5.0)


def another_library(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(globals(), "math", SimpleNamespace(e=5.0))


CHANGES_OF_CODE = [
    another_default_of_a_method,
    another_default_in_a_container,
    another_value_in_a_python_module_that_is_an_attribute,
    another_value_that_is_read_by_getattr,
    another_value_two_python_modules_away,
    another_constant_of_a_library,
    another_library,
]


@shows("Code that changes between forward and backward")
@pytest.mark.parametrize("change", CHANGES_OF_CODE)
@pytest.mark.parametrize("wrap", [torchs, reactivate.checkpoint(check="metadata")], ids=["torch", "ours"])
def test_code_that_changes_between_forward_and_backward(
    change: Callable[[pytest.MonkeyPatch], None], wrap: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, found = (gradient_of_coded(way, lambda: None) for way in (plain, wrap))
    assert torch.equal(expected, found)
    assert not torch.equal(expected, gradient_of_coded(wrap, lambda: change(monkeypatch)))


def gradient_of_coded(wrap: Callable[[Fn], Fn], change: Callable[[], None]) -> Tensor:
    torch.manual_seed(0)
    x = leaf()
    out = wrap(Coded())(x)
    change()
    return torch.autograd.grad(out.sum(), x)[0]

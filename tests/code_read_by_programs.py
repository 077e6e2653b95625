"""A Python module that programs name: values, a container, functions, and a function of another Python module."""

from __future__ import annotations

from code_read_from_afar import distant

scale = 2.0
table = {"scale": 2.0}


def helper(factor: float = 2.0, *, shift: float = 0.0) -> float:
    return factor + shift


def reads_scale() -> float:
    return scale


def reads_from_afar() -> float:
    return distant()

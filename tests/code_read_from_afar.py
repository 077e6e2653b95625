"""A Python module that another one names."""

from __future__ import annotations

scale = 2.0


def distant(factor: float = 1.0) -> float:
    return scale * factor

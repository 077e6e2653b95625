"""Warnings that name the user's line."""

from __future__ import annotations

import sys
import warnings
from types import FrameType

# This package, torch, what calls models for their users, and what calls the functions of this package that are decorated.
_LIBRARIES = frozenset(
    {"reactivate", "torch", "transformers", "accelerate", "lightning", "pytorch_lightning", "contextlib"}
)


def warn(message: str) -> None:
    """Warn at the innermost line of the stack that is outside of the libraries."""
    level = 2
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _is_library(frame):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)


def _is_library(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__")).partition(".")[0] in _LIBRARIES

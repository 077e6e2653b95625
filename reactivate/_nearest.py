"""Words of error messages: a name that somebody may have meant, and a short description of a value."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.nn import Module

LONGEST = 80  # characters of a description


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return the nearest of the known names, as a question behind a space; empty if none is near.

    Example:
        >>> from reactivate._nearest import did_you_mean
        >>> did_you_mean("LamaConfig", ["LlamaConfig", "ViTConfig"])
        " Did you mean 'LlamaConfig'?"
    """
    close = difflib.get_close_matches(name, list(known), n=3, cutoff=0.7)
    return f" Did you mean {' or '.join(map(repr, close))}?" if close else ""


def described(value: Any) -> str:
    """Return a description of a value, short enough for a message.

    Example:
        >>> from reactivate._nearest import described
        >>> described(torch.ones(2, 3)), described(torch.nn.Linear), described("full")
        ('a Tensor of shape (2, 3)', 'the class Linear', "'full'")
    """
    if isinstance(value, Tensor):
        return f"a {type(value).__name__} of shape {tuple(value.shape)}"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if isinstance(value, Module):
        return f"a module of class {type(value).__name__}"
    if isinstance(value, (list, tuple, dict)):
        return f"a {type(value).__name__} of {len(value)}"
    text = repr(value)
    return text if len(text) <= LONGEST else f"an object of class {type(value).__name__}"


def name_of(value: Any) -> str:
    """Return what a call of a function or of a module is written with: "f", "Block(...)"."""
    if isinstance(value, Module):
        return f"{type(value).__name__}(...)"
    name = getattr(value, "__name__", None)
    return name if isinstance(name, str) and name.isidentifier() else "f"

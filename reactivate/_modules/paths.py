"""Paths of modules, as in `model.named_modules()`."""

from __future__ import annotations

THE_MODEL = "the model itself"
"""The path of a model in words: in `named_modules()` it is empty."""


def is_below(path: str, above: str) -> bool:
    """Return whether a module is, or is inside of, another.

    Examples:
        >>> from reactivate._modules.paths import is_below
        >>> is_below("layers.1.mlp", "layers.1"), is_below("layers.10", "layers.1"), is_below("head", "")
        (True, False, True)
    """
    return not above or path == above or path.startswith(f"{above}.")

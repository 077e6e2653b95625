"""What somebody may have meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The nearest of the known names, as a question behind a space; empty if none is near.

    Example:
        >>> from reactivate.cli.nearest import did_you_mean
        >>> did_you_mean("LamaConfig", ["LlamaConfig", "ViTConfig"])
        " Did you mean 'LlamaConfig'?"
    """
    close = difflib.get_close_matches(name, list(known), n=3, cutoff=0.7)
    return f" Did you mean {' or '.join(map(repr, close))}?" if close else ""

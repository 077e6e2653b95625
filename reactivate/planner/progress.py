"""Says on the terminal what a long search is at, where there is a terminal and rich is installed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Tell = Callable[[str], None]


@contextmanager
def progress(title: str) -> Iterator[Tell]:
    """Yields what is called with each thing that begins."""
    if not sys.stderr.isatty():
        yield _nothing
        return
    try:
        from rich.console import Console
    except ImportError:
        yield _nothing
        return
    with Console(stderr=True).status(title) as status:
        yield lambda text: status.update(f"{title}: {text}")


def _nothing(text: str) -> None:
    """Say nothing."""

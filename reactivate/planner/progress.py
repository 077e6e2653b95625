"""The time of planning: progress on stderr, and Python's garbage collector.

Progress is a line that rich keeps on a terminal, otherwise a new line now and then. A plan makes hundreds of thousands of
small objects that live until it is done, so that the collector would look at every object of the process again and again,
and a library such as transformers has a million of them: up to a quarter of the time.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Any

from reactivate._text.table import classes_of_rich

Tell = Callable[[str], None]

INTERVAL_SECONDS = 10.0  # at least, between two lines in a notebook or a log: a search that is shorter writes none


@contextmanager
def progress(title: str) -> Iterator[Tell]:
    """Yield a function to call with each thing that begins."""
    console = _console() if sys.stderr.isatty() else None
    if console is not None:
        with console.status(title) as status:
            yield lambda text: status.update(f"{title}: {text}")
        return
    last = monotonic()

    def tell(text: str) -> None:
        """Write a line if the last one is long enough ago."""
        nonlocal last
        if monotonic() - last >= INTERVAL_SECONDS:
            print(f"{title}: {text}", file=sys.stderr, flush=True)
            last = monotonic()

    yield tell


def _console() -> Any:
    found = classes_of_rich()
    return None if found is None else found[0](stderr=True)


@contextmanager
def older_objects_left_out() -> Iterator[None]:
    """Leave the objects that are there out of garbage collections, inside of the context. Newer ones are collected.

    Nothing changes if objects are frozen already, or if the collector is off.
    """
    if not gc.isenabled() or gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()

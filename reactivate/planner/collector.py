"""Python's garbage collector, for the time of planning.

A plan makes hundreds of thousands of small objects that live until it is done, so that the collector looks at every object of
the process again and again, and a library such as transformers has a million of them: up to a quarter of the time.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def older_objects_left_out() -> Iterator[None]:
    """Leave the objects that are there out of garbage collections, inside of the context. Newer ones are collected.

    Nothing changes where somebody has frozen objects, or has turned the collector off.
    """
    if not gc.isenabled() or gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()

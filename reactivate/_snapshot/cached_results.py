"""The results in a `functools.cache`: a recomputation finds what its forward found, and computes what that computed."""

from __future__ import annotations

import functools
import gc
from collections.abc import Iterable
from typing import Any

import torch

from reactivate._snapshot.held import ATOMS
from reactivate._snapshot.holders import Contents, DictHolder
from reactivate._snapshot.kinds import is_librarys_package

CACHED = type(functools.cache(len))
"""The class of functions under `functools.cache` and `functools.lru_cache`."""


def results_in(fn: Any) -> dict[Any, Any] | None:
    """Return the dict in which a cache of the user's keeps all results.

    None of one with a `maxsize`, which keeps an order in C as well, and of those of libraries.
    """
    parameters = getattr(fn, "cache_parameters", None)
    if parameters is None or parameters()["maxsize"] is not None:
        return None
    return None if is_librarys_package(str(fn.__module__).partition(".")[0]) else _dict_in(fn)


def _dict_in(fn: Any) -> dict[Any, Any] | None:
    if not _is_found():
        return None
    return next((item for item in gc.get_referents(fn) if type(item) is dict and item is not vars(fn)), None)


@functools.cache
def _is_found() -> bool:
    """Return whether the collector tells of that dict, as in CPython, and the cache goes by what is in it."""
    calls: list[int] = []
    tried = functools.cache(calls.append)
    tried(1)
    found = [item for item in gc.get_referents(tried) if type(item) is dict and item is not vars(tried)]
    if len(found) != 1 or list(found[0]) != [1]:
        return False
    found[0].clear()
    tried(1)
    return calls == [1, 1] and list(found[0]) == [1]


class ResultsHolder(DictHolder):
    """The results in a `functools.cache`, by the arguments that they were computed for."""

    __slots__ = ()
    name = "the results in a functools.cache"

    def kept_with(self, contents: Contents) -> Iterable[Any] | None:
        return (self.target,) if all(map(_leads_nowhere, contents)) else None


def _leads_nowhere(item: Any) -> bool:
    if type(item) is tuple:
        return all(map(_leads_nowhere, item))
    return type(item) in ATOMS or (type(item) is torch.Tensor and item.grad_fn is None and not vars(item))

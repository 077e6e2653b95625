"""Warn once if regions fill a key-value cache of transformers, whose tensors then outlive the regions.

A model of transformers with `use_cache=True` hands one cache object to all of its layers, and each layer adds its keys
and values to it. Gradients are right, but these tensors are not recomputed: the cache holds them. How many bytes that is
cannot be told from the model's config, so the first call of each region is measured: the memory that is in the cache
after the call and was not before. Then the watch ends, and later steps cost nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from torch import Tensor, is_grad_enabled

from reactivate._region.accounts import Ledger, in_words
from reactivate._region.options import Options
from reactivate._region.run import run
from reactivate._setting import set_to
from reactivate._text.warnings import warn
from reactivate._text.words import counted


@dataclass
class Caller:
    """A function of the user's call that applies policies or runs models: it warns once, whatever it tries."""

    name: str
    has_warned: bool = False


_caller: ContextVar[Caller | None] = ContextVar("reactivate.caller", default=None)


def called(caller: Caller) -> AbstractContextManager[None]:
    """Let `caller` be the one that warns of the caches that are found inside of the context."""
    return set_to(_caller, caller)


class CacheWatch:
    """Run the first call of each region of a model, and measure what it leaves in a cache.

    Attributes:
        regions: how many regions the model has.
        is_done: whether all of them were measured, or one was called again.
        left_bytes: what they left.
    """

    def __init__(self) -> None:
        self.regions = 0
        self.is_done = False
        self.left_bytes = 0
        self._filling: set[str] = set()  # the regions that left something
        self._called: set[str] = set()
        self._kind = ""

    def run(self, path: str, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any], options: Options) -> Any:
        """Call a region, as `region.run` does."""
        if not is_grad_enabled():
            return run(fn, args, kwargs, options)
        if path in self._called:
            self._end()
            return run(fn, args, kwargs, options)
        caches = list(_caches_in(args, kwargs))
        before = Ledger(tensor for cache in caches for tensor in _tensors_in(cache))
        result = run(fn, args, kwargs, options)
        left_bytes = before.enter_all(tensor for cache in caches for tensor in _tensors_in(cache))
        if left_bytes:
            self.left_bytes += left_bytes
            self._filling.add(path)
            self._kind = type(caches[0]).__name__
        self._called.add(path)
        if len(self._called) == self.regions:
            self._end()
        return result

    def _end(self) -> None:
        self.is_done = True
        caller = _caller.get() or Caller("apply")
        if self.left_bytes and not caller.has_warned:
            caller.has_warned = True
            warn(
                f"{caller.name}: use_cache is on. The first call of {len(self._filling)} of "
                f"{counted(self.regions, 'region')} left {in_words(self.left_bytes)} of keys and values in its "
                f"{self._kind}. Every step keeps such a cache until its backward, although the regions recompute their "
                "other activations. Training has no use for it: write model.config.use_cache = False, or call the model "
                "with use_cache=False. The gradients are the same."
            )


def _caches_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Any]:
    module = sys.modules.get("transformers.cache_utils")
    if module is not None:
        yield from (value for value in (*args, *kwargs.values()) if isinstance(value, module.Cache))


def _tensors_in(value: Any, seen: set[int] | None = None) -> Iterator[Tensor]:
    """The tensors of a cache: in its attributes, in those of its layers, and in containers."""
    seen = set() if seen is None else seen
    if isinstance(value, Tensor):
        yield value
    elif id(value) not in seen:
        seen.add(id(value))
        for part in _parts_of(value):
            yield from _tensors_in(part, seen)


def _parts_of(value: Any) -> Iterable[Any]:
    if isinstance(value, (list, tuple)):
        return value
    if isinstance(value, dict):
        return value.values()
    return vars(value).values() if type(value).__module__.startswith("transformers.") else ()

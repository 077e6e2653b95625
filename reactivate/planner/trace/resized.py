"""Storages whose memory goes and comes back while they live: sharded parameters are gathered into such.

No mode sees `storage.resize_`, so that is observed, and the sizes of storages that it was used on are looked at before each
op. What counts is those that ops write to outside of autograd: a parameter that is gathered, once for the forward and once
for the backward.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from reactivate._region.accounts import storages_of
from reactivate._torch.ops import StorageResizes, leaves_at_op, written_values


class ResizedStorages:
    """Looks at the sizes of storages.

    Args:
        tell: called with the id of a storage and the bytes that it has.
    """

    def __init__(self, tell: Callable[[int, int], None]) -> None:
        self._tell = tell
        self._watched: dict[int, tuple[weakref.ref[UntypedStorage], int]] = {}  # and how large they were
        self._touched: set[int] = set()  # since they were looked at

    @contextmanager
    def observed(self) -> Iterator[None]:
        """Inside, storages that are resized are taken down."""
        resizes = StorageResizes(lambda storage: self._touched.add(id(storage)))
        resizes.begin()
        try:
            yield
        finally:
            resizes.end()

    def watch(self, op: Any, args: Any, kwargs: Any, own: Container[int]) -> None:
        """An op has run: if it has written to storages of the step's own outside of autograd, look at these from now on."""
        if torch.is_grad_enabled():
            return
        for leaf in leaves_at_op(written_values(op, args, kwargs)):
            for storage in storages_of(leaf) if isinstance(leaf, Tensor) else ():
                if id(storage) in own:
                    self._touched.add(id(storage))
                    self._watched.setdefault(id(storage), (weakref.ref(storage), int(storage.nbytes())))

    def forget(self, key: int) -> None:
        """A storage is gone."""
        self._watched.pop(key, None)

    def look(self) -> None:
        """Tell the sizes of those that have another one than before."""
        while self._touched:
            key = self._touched.pop()
            reference, before = self._watched.get(key, (None, 0))
            storage = None if reference is None else reference()
            if reference is not None and storage is not None and storage.nbytes() != before:
                self._watched[key] = reference, int(storage.nbytes())
                self._tell(key, int(storage.nbytes()))

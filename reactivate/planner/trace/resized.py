"""Storages whose memory goes and comes back while they live: sharded parameters are gathered into such.

No mode sees `storage.resize_`, so that is observed, and the sizes of storages that it was used on are looked at before each
op. What counts is those that ops write to outside of autograd: a parameter that is gathered, once for the forward and once
for the backward.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import UntypedStorage

from reactivate._region.accounts import storages_of
from reactivate._torch.ops import StorageResizes, tensors_at_op, written_values


class ResizedStorages:
    """Looks at the sizes of storages.

    Args:
        tell: called with the id of a storage and the bytes that it has.

    Attributes:
        resizes: a context in which it is told of storages that are resized.
    """

    def __init__(self, tell: Callable[[int, int], None]) -> None:
        self._tell = tell
        self._watched: WeakKeyDictionary[UntypedStorage, int] = WeakKeyDictionary()  # and how large they were
        self._touched: WeakSet[UntypedStorage] = WeakSet()  # since they were looked at
        self.resizes = StorageResizes(self._touched.add)

    def watch(self, op: Any, args: Any, kwargs: Any, own: Container[int]) -> None:
        """An op has run: if it has written to storages of the step's own outside of autograd, look at these from now on."""
        if torch.is_grad_enabled():
            return
        for tensor in tensors_at_op(written_values(op, args, kwargs)):
            for storage in storages_of(tensor):
                if id(storage) in own:
                    self._touched.add(storage)
                    self._watched.setdefault(storage, int(storage.nbytes()))

    def look(self) -> None:
        """Tell the sizes of those that have another one than before."""
        if not self._touched:  # as mostly
            return
        touched = list(self._touched)
        self._touched.clear()
        for storage in touched:
            if self._watched.get(storage, storage.nbytes()) != storage.nbytes():
                self._watched[storage] = int(storage.nbytes())
                self._tell(id(storage), int(storage.nbytes()))

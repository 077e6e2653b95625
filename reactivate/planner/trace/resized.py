"""Storages whose memory goes and comes back while they live: sharded parameters are gathered into such.

No mode sees `storage.resize_`, so the sizes of those that it may be used on are looked at before each op. These are the
ones that ops write to outside of autograd: a parameter that is gathered, once for the forward and once for the backward.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from reactivate._region.accounts import storages_of
from reactivate._torch.ops import leaves_at_op, written_values


class ResizedStorages:
    """Looks at the sizes of storages.

    Args:
        tell: called with the id of a storage and the bytes that it has.
    """

    def __init__(self, tell: Callable[[int, int], None]) -> None:
        self._tell = tell
        self._watched: dict[int, tuple[weakref.ref[UntypedStorage], int]] = {}  # and how large they were

    def watch(self, op: Any, args: Any, kwargs: Any, own: Container[int]) -> None:
        """An op has run: if it has written to storages of the step's own outside of autograd, look at these from now on."""
        if torch.is_grad_enabled():
            return
        for leaf in leaves_at_op(written_values(op, args, kwargs)):
            for storage in storages_of(leaf) if isinstance(leaf, Tensor) else ():
                if id(storage) in own:
                    self._watched.setdefault(id(storage), (weakref.ref(storage), int(storage.nbytes())))

    def forget(self, key: int) -> None:
        """A storage is gone."""
        self._watched.pop(key, None)

    def look(self) -> None:
        """Tell the sizes of those that have another one than before."""
        for key, (reference, before) in self._watched.items():
            storage = reference()
            if storage is not None and storage.nbytes() != before:
                self._watched[key] = reference, int(storage.nbytes())
                self._tell(key, int(storage.nbytes()))

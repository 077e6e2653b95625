"""Stale tensors: modified since the forward read them, without a copy of what they held (Rule 15).

A function may reach more than it reads: a bound method reaches its whole model, of which an optimizer may step a part
before this backward; a log that every region writes one entry of is read by none. So the ops of a recomputation are
watched where anything is stale, and only one that reads stale memory is refused. Mostly nothing is, and nobody watches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from reactivate._engine.counted import call_counted
from reactivate.errors import MutationError

_FILLS = frozenset({"copy_", "fill_", "zero_", "normal_", "uniform_", "bernoulli_", "set_"})
"""Ops in place that do not read what they write to."""


class StaleReads(TorchDispatchMode):
    """Refuses every op that reads one of `tensors`, or memory of theirs.

    Memory that the recomputation itself has filled may be read, in the same shape.

    Args:
        tensors: what a recomputation must not read.
        refuse: makes the error for one of them.

    Raises:
        MutationError: from the op; and from the end of the context, if the function has swallowed it.
    """

    def __init__(self, tensors: Iterable[Tensor], refuse: Callable[[Tensor], MutationError]) -> None:
        super().__init__()
        self._stale = {id(tensor): tensor for tensor in tensors}
        self._memory = {key: tensor for tensor in tensors if (key := memory_of(tensor)) is not None}
        self._filled: set[Any] = set()
        self._refuse = refuse
        self._refused: MutationError | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if is_view(func):
            return func(*args, **kwargs)
        if name in _FILLS and args:
            self._look_at((args[1:], kwargs))
            result = func(*args, **kwargs)
            self._filled.add(_place_of(args[0]))
            return result
        self._look_at((args, kwargs))
        return call_counted(func, args, kwargs)

    def _look_at(self, value: Any) -> None:
        if isinstance(value, Tensor):
            found = self._stale.get(id(value))
            if found is None and self._memory:
                found = self._memory.get(memory_of(value))
            if found is not None and _place_of(value) not in self._filled:
                self._refused = self._refuse(found)
                raise self._refused
        elif isinstance(value, (tuple, list)):
            for item in value:
                self._look_at(item)
        elif isinstance(value, dict):
            self._look_at(list(value.values()))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, traceback)
        if self._refused is not None and error is not self._refused:
            raise self._refused


def is_view(func: Any) -> bool:
    """Return whether an op looks at no element."""
    return bool(func.is_view or func.overloadpacket.__name__ == "detach")


def memory_of(tensor: Tensor) -> Any:
    """Return what tensors have in common that share memory, None where that cannot be told."""
    if type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__ or tensor.layout is not torch.strided:
        return None
    return None if tensor.device.type in ("xla", "meta") else tensor.untyped_storage()._cdata


def _place_of(tensor: Tensor) -> Any:
    memory = memory_of(tensor)
    if memory is None:
        return id(tensor)
    return memory, tensor.storage_offset(), tensor.size(), tensor.stride(), tensor.dtype

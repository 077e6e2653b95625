"""Writes of collectives in place, which move no version: to what a saved call has returned, and to what one is given.

What a saved call keeps is the memory of its result. `dist.all_reduce(result)` changes that memory, in the region or behind
it, so that the call has to run again, as after any other write. While a policy saves calls in a group of processes, the
collectives tell of their writes; by the memory, this file finds what relies on it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import Any
from weakref import finalize, ref

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from reactivate._saved_calls.choice import Choice
from reactivate._snapshot.geometry import memory_of
from reactivate._torch.modules import is_distributed_run
from reactivate._torch.ops import collective_writes, tensors_in

# By the memory: a weak reference, which keeps the key from passing to other memory, and the readers.
_readers: dict[int, tuple[StorageWeakRef, list[ref[Any]]]] = {}


def watch(choice: Choice) -> None:
    """Hear of collectives for as long as a policy's choice lives, in a group of processes."""
    if is_distributed_run() and not choice.is_watching:
        choice.is_watching = True
        _writes.begin()
        finalize(choice, _writes.end)


def rely_on(reader: Any, tensors: Iterable[Tensor]) -> None:
    """Set `reader.is_overwritten` if a collective writes to the memory of one of the tensors from now on."""
    for memory, tensor in _memory_in(tensors):
        entry = _readers.get(memory)
        if entry is None:
            entry = _readers[memory] = StorageWeakRef(tensor.untyped_storage()), []
        entry[1].append(ref(reader, functools.partial(_forget, memory)))


def _forget(memory: int, reference: ref[Any]) -> None:
    entry = _readers.get(memory)
    if entry is not None:
        entry[1].remove(reference)
        if not entry[1]:
            del _readers[memory]


def _note(written: Any) -> None:
    if _readers:
        for memory, _ in _memory_in(tensors_in((written,), {})):
            _, references = _readers.get(memory, (None, ()))
            for reference in tuple(references):
                reader = reference()
                if reader is not None:
                    reader.is_overwritten = True


_writes = collective_writes(_note)


def _memory_in(tensors: Iterable[Tensor]) -> Iterator[tuple[int, Tensor]]:
    """Yield the memory of tensors, and of those that they are made of, each with a tensor in it."""
    for tensor in tensors:
        memory = memory_of(tensor)
        if memory is not None:
            yield memory, tensor
        elif hasattr(tensor, "__tensor_flatten__"):
            parts = (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
            yield from _memory_in(
                part for part in parts if isinstance(part, Tensor)
            )  # a DTensor names its mesh as well

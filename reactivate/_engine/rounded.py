"""Rounded tensors: what a storage that is not exact gave back, and what a recomputation computes from it.

Such a recomputation has other values than its forward, as was asked for. The self-check leaves these out, and compares what
comes from exact tensors alone. So the memory of rounded tensors is known for as long as it is alive, and in a recomputation
that is compared a dispatch mode sees which ops read it. Mostly nothing is rounded, and nobody watches.
"""

from __future__ import annotations

from collections.abc import Iterator
from threading import Lock
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from reactivate._engine.mismatch.counted import call_counted
from reactivate._engine.state.memory import memory_of
from reactivate._torch.ops import written_values
from reactivate._types import DEVICE, Storage
from reactivate.errors import UsageError


class _Memories:
    """Memory that is alive, or was until not long ago: it gets no other address as long as it is in here."""

    def __init__(self) -> None:
        self._references: dict[Any, StorageWeakRef] = {}
        self._most = _FEW
        self._lock = Lock()

    def __contains__(self, memory: Any) -> bool:
        return memory in self._references

    def add(self, memory: Any, tensor: Tensor) -> None:
        """Note the memory of a tensor; of what is gone by now it lets go whenever there is twice as much."""
        with self._lock:
            if len(self._references) >= self._most:
                self._references = {key: item for key, item in self._references.items() if not item.expired()}
                self._most = max(_FEW, 2 * len(self._references))
            self._references[memory] = StorageWeakRef(tensor.untyped_storage())

    def any_is_alive(self) -> bool:
        """Return whether there is any."""
        with self._lock:
            return any(not item.expired() for item in self._references.values())


_FEW = 64
_rounded = _Memories()


def is_exact(storage: Storage) -> bool:
    """Return whether a storage gives back every bit.

    Raises:
        UsageError: it does not say.
    """
    exact = getattr(storage, "exact", None)
    if exact is None:
        raise UsageError(
            f"The storage {storage!r} does not say whether it gives back every bit: give its class `exact = True`, or False."
        )
    return bool(exact)


def note_rounded(tensor: Tensor) -> None:
    """Take note that `tensor` has other values than it had in the forward."""
    for part in _parts_of(tensor):
        _rounded.add(memory_of(part), part)


def is_anything_rounded() -> bool:
    """Return whether there may be a rounded tensor anywhere."""
    return _rounded.any_is_alive()


def inexact_storages(record: Any) -> list[Storage]:
    """Return the storages of a region from which its recomputation may get other values than the forward had."""
    if record.options.inputs is DEVICE and not record.sites:  # as mostly
        return []
    outputs = [getattr(item, "noise", item) for site in record.sites for item in site.outputs or ()]
    results = [item for item in outputs if getattr(item, "is_rounded", False)]
    found = [record.options.inputs, *(item.storage for item in results)]
    return [storage for storage in found if not is_exact(storage)]


def refuse_values(storage: Storage) -> None:
    """Raise if a storage is not exact: `determinism="values"` compares every op.

    Raises:
        UsageError: it is not.
    """
    if not is_exact(storage):
        raise UsageError(
            f'determinism="values" compares every op of a recomputation with the forward, and the storage {storage!r} is not '
            "exact: every op that reads what it kept would differ. Leave out one of the two."
        )


class RoundedReads(TorchDispatchMode):
    """Follows what a recomputation computes from rounded tensors."""

    def __init__(self) -> None:
        super().__init__()
        self._computed: dict[Any, StorageWeakRef] = {}

    def has(self, tensor: Tensor) -> bool:
        """Return whether `tensor` is rounded, or computed from one that is."""
        return any((memory := memory_of(part)) in _rounded or memory in self._computed for part in _parts_of(tensor))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        is_rounded = any(map(self.has, _tensors_in((args, kwargs))))
        result = call_counted(func, args, kwargs)
        if is_rounded:
            for tensor in _tensors_in((result, written_values(func, args, kwargs))):
                for part in _parts_of(tensor):
                    self._computed[memory_of(part)] = StorageWeakRef(part.untyped_storage())
        return result


def _parts_of(tensor: Tensor) -> Iterator[Tensor]:
    """List the tensors with memory that a tensor is made of: itself, mostly."""
    if not isinstance(tensor, Tensor):  # a DTensor names its mesh as well
        return
    if memory_of(tensor) is not None:
        yield tensor
    elif hasattr(type(tensor), "__tensor_flatten__"):
        for name in tensor.__tensor_flatten__()[0]:  # type: ignore[attr-defined]
            yield from _parts_of(getattr(tensor, name))


def _tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors_in(item)
    elif isinstance(value, dict):
        yield from _tensors_in(list(value.values()))

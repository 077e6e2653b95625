"""Names of values: tensors have the same name in two steps if the same ops made them of the same values."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Hashable, Iterable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, UntypedStorage

from reactivate._inspect.fake import has_no_memory
from reactivate._region.accounts import storages_of
from reactivate._torch.modes import unset_fake_temporarily
from reactivate._torch.ops import leaves_at_op, tensors_at_op, written_arguments, written_values

_COPIES = frozenset({torch.ops.aten.clone.default, torch.ops.aten._to_copy.default})
_MOST_READ = 2**26  # bytes of a tensor of unknown origin that is known by its values


class ValueNames:
    """The names of the values in one step.

    Random numbers have names that do not tell one draw from another: steps that are compared must draw the same.

    Args:
        numbers: a number for each thing that has a name; shared by the steps whose names are compared.
        known: tensors that are there before the step, in the same order in each step.
    """

    def __init__(self, numbers: dict[Hashable, int], known: Iterable[Tensor]) -> None:
        self._numbers = numbers
        self._storages: WeakKeyDictionary[UntypedStorage, int] = WeakKeyDictionary()
        for place, tensor in enumerate(known):
            self._name_new(tensor, "known", place)

    def call(self, op: Any, args: Any, kwargs: Any) -> int:
        """Return the name of a call: of an op and the values that it is given."""
        outputs = {name for _, name, is_output in written_arguments(op) if is_output}
        named = ((name, self._output(item) if name in outputs else self._thing(item)) for name, item in kwargs.items())
        return self._number(("call", op, self._thing(args), tuple(named)))

    def _output(self, value: Any) -> Hashable:
        """Name what is only written to, `out=`: by its geometry, if it is all of its memory."""
        if isinstance(value, (list, tuple)):
            return tuple(map(self._output, value))
        return ("output", _place_of(value)) if isinstance(value, Tensor) and _is_whole(value) else self._thing(value)

    def made(self, call: int, op: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Name what a call has written and made."""
        copied = _copied(op, args, result)
        if copied is not None:
            source, copy = copied
            self._storages[copy.untyped_storage()] = self._name_of(source.untyped_storage(), source)
            return
        for place, tensor in enumerate(tensors_at_op(written_values(op, args, kwargs))):
            for part, storage in enumerate(storages_of(tensor)):
                self._storages[storage] = self._number(("written", call, place, part))
        for place, leaf in enumerate(leaves_at_op(result)):
            if isinstance(leaf, Tensor):
                self._name_new(leaf, "made", call, place)

    # -- tensors ------------------------------------------------------------------------------------------------------

    def of(self, tensor: Tensor) -> int:
        """Return the name of a tensor's value: of its memory, and of its place there."""
        if hasattr(tensor, "__tensor_flatten__"):
            names, facts = tensor.__tensor_flatten__()
            return self._number(("parts", *(self._thing(getattr(tensor, name)) for name in names), repr(facts)))
        if tensor.is_nested:  # its shape is no tuple of numbers
            return self._number(_Itself(tensor))
        memory = tuple(self._name_of(storage, tensor) for storage in storages_of(tensor))
        return self._number(("tensor", memory, _place_of(tensor)))

    def _name_of(self, storage: UntypedStorage, tensor: Tensor) -> int:
        if storage not in self._storages:  # torch gives a storage one Python object for life
            self._storages[storage] = self._number(_contents_of(storage, tensor))
        return self._storages[storage]

    def _name_new(self, tensor: Tensor, *origin: Hashable) -> None:
        for part, storage in enumerate(storages_of(tensor)):
            if storage not in self._storages:
                self._storages[storage] = self._number((*origin, part))

    # -- what names stand for -----------------------------------------------------------------------------------------

    def _thing(self, value: Any) -> Hashable:
        if isinstance(value, Tensor):
            return self.of(value)
        if isinstance(value, (list, tuple)):
            return tuple(self._thing(item) for item in value)
        if isinstance(value, dict):
            return tuple((name, self._thing(item)) for name, item in value.items())
        if isinstance(value, Hashable):
            return type(value), value  # 1, 1.0 and True are equal
        return _Itself(value)

    def _number(self, thing: Hashable) -> int:
        return self._numbers.setdefault(thing, len(self._numbers))


class _Itself:
    """Something that equals nothing else."""

    def __init__(self, value: Any) -> None:
        self._value = value


def _place_of(tensor: Tensor) -> Hashable:
    if tensor.layout is not torch.strided:
        return tensor.layout, tuple(tensor.shape), tensor.dtype
    geometry = tuple(tensor.shape), tensor.stride(), tensor.storage_offset()
    return geometry, tensor.dtype, tensor.is_conj(), tensor.is_neg()


def _copied(op: Any, args: Any, result: Any) -> tuple[Tensor, Tensor] | None:
    """Return source and copy, where an op copies a whole memory as it lies; None if it does anything else."""
    if op in _COPIES:
        source, copy = args[0], result
    elif op is torch.ops.aten.copy_.default:
        copy, source = args[:2]
    else:
        return None
    is_same = _is_whole(source) and _is_whole(copy) and _place_of(source) == _place_of(copy)
    return (source, copy) if is_same else None


def _is_whole(tensor: Tensor) -> bool:
    """Return whether a tensor is all of its memory."""
    if hasattr(tensor, "__tensor_flatten__") or tensor.layout is not torch.strided or tensor.is_nested:
        return False
    return int(tensor.untyped_storage().nbytes()) == tensor.numel() * tensor.element_size()


def _contents_of(storage: UntypedStorage, tensor: Tensor) -> Hashable:
    """Return what stands for a memory that no op has made, as `torch.tensor(3)` has it: its bytes."""
    size_bytes = int(storage.nbytes())
    if has_no_memory(tensor) or size_bytes > _MOST_READ:
        return _Itself(None)
    with unset_fake_temporarily():
        here = storage.cpu()
    return "bytes", hashlib.sha256(ctypes.string_at(here.data_ptr(), size_bytes)).digest()

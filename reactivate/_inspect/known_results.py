"""The results of ops on fake tensors, reproduced where the same call has run before.

A fake tensor's op runs Python that works out shapes, strides and dtypes, and the blocks of a model make the same calls over
and over. So each call runs once, and for the next ones like it tensors are made that are as its results were. torch's fake
mode remembers calls as well: it keeps them for the whole process, takes three times as long, and leaves out calls that
are given a tensor with values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from reactivate._torch.modes import FakeTensor, without_dispatch, without_function_modes
from reactivate._torch.ops import OpOverload, returns_arguments, written_arguments

Facts = tuple[Any, ...]

_BY_VALUE = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view})
_PLAIN = (bool, int, float, complex, str, torch.dtype, torch.device, torch.layout, torch.memory_format, type(None))


class _KnownResult(NamedTuple):
    """A result, by which others are made.

    Attributes:
        given: the number of the argument that it is; None for another tensor.
        memory: the number of the argument whose memory it lies in; None for memory of its own.
        shape, stride, offset, dtype, device: its own.
    """

    given: int | None = None
    memory: int | None = None
    shape: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    offset: int = 0
    dtype: torch.dtype = torch.float32
    device: torch.device | None = None


class KnownCall(NamedTuple):
    """A call that has run.

    Attributes:
        container: what its results lie in; None for a lone one.
        results: these, in order; None for a result that is None.
    """

    container: Callable[[Any], Any] | None
    results: tuple[_KnownResult | None, ...]


KnownCalls = dict[Facts, KnownCall | None]


class KnownResults:
    """Runs ops, each with the same arguments once.

    Args:
        mode: that of the fake tensors.
        calls: those that are known, of this step or of others like it. They hold no tensor.
    """

    def __init__(self, mode: Any, calls: KnownCalls | None = None) -> None:
        self._mode = mode
        self._is_static = mode.shape_env is None  # sizes that are symbols cannot be compared
        self._calls = {} if calls is None else calls

    def of(self, op: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Return the result of a call."""
        if not self._is_static or not _is_by_metadata(op):
            return op(*args, **kwargs)
        tensors: list[Tensor] = []
        with without_dispatch(), without_function_modes():
            key = self._key_of(op, args, kwargs, tensors)
            call = None if key is None else self._calls.get(key)
            if call is not None:
                return self._made(call, tensors)
        with self._mode:
            result = op(*args, **kwargs)
        if key is not None and key not in self._calls:
            with without_dispatch(), without_function_modes():
                is_as_before = key == self._key_of(op, args, kwargs, [])
                self._calls[key] = self._call_of(result, tensors) if is_as_before else None
        return result

    # -- the facts of a call ------------------------------------------------------------------------------------------

    def _key_of(self, op: Any, args: Any, kwargs: dict[str, Any], tensors: list[Tensor]) -> Facts | None:
        """Return all that a result depends on, and list the tensors that are given; None where values may matter."""
        facts: list[Any] = [op, torch.get_default_dtype(), torch.is_inference_mode_enabled()]
        if not self._enter(args, facts, tensors) or not self._enter(kwargs, facts, tensors):
            return None
        if any(type(tensor) is not FakeTensor for tensor in tensors) and (
            written_arguments(op) or returns_arguments(op)  # a fake one in its place would be written to, or returned
        ):
            return None
        if len(tensors) > 1:  # which of them lie in the same memory, and which are the same
            memory = [id(tensor.untyped_storage()) for tensor in tensors]
            objects = list(map(id, tensors))
            facts += map(memory.index, memory)
            facts += map(objects.index, objects)
        return tuple(facts)

    def _enter(self, value: Any, facts: list[Any], tensors: list[Tensor]) -> bool:
        kind = type(value)
        if kind is FakeTensor or kind is Tensor or kind is Parameter:
            if kind is FakeTensor and (value.constant is not None or value.fake_mode is not self._mode):
                return False
            tensors.append(value)
            found = _facts_of(value)
            facts.append(found)
            return found is not None
        facts.append(kind)
        if kind is tuple or kind is list:
            facts.append(len(value))
            return all(self._enter(item, facts, tensors) for item in value)
        if kind is dict:
            facts += value
            return all(self._enter(item, facts, tensors) for item in value.values())
        facts.append(value)
        return kind in _PLAIN

    # -- what it returns ----------------------------------------------------------------------------------------------

    def _call_of(self, result: Any, tensors: Sequence[Tensor]) -> KnownCall | None:
        """Return what makes such a result; None where nothing does."""
        container = type(result) if type(result) in (tuple, list) else None
        results: list[_KnownResult | None] = []
        memory = [id(tensor.untyped_storage()) for tensor in tensors]
        own: set[int] = set()
        for item in (result,) if container is None else result:
            if item is None:
                results.append(None)
                continue
            known = self._known_of(item, tensors, memory)
            if known is None:
                return None
            if known.given is None and known.memory is None:
                place = id(item.untyped_storage())
                if place in own:  # in the same memory as one before
                    return None
                own.add(place)
            results.append(known)
        return KnownCall(container, tuple(results))

    def _known_of(self, item: Any, tensors: Sequence[Tensor], memory: Sequence[int]) -> _KnownResult | None:
        number = next((number for number, tensor in enumerate(tensors) if tensor is item), None)
        if number is not None:
            return _KnownResult(number)
        if type(item) is not FakeTensor or item.constant is not None or item.layout is not torch.strided:
            return None
        place = id(item.untyped_storage())
        at = memory.index(place) if place in memory else None
        geometry = tuple(item.shape), item.stride(), item.storage_offset()
        known = _KnownResult(None, at, *geometry, item.dtype, item.fake_device)
        return known if _facts_of(self._tensor(known, tensors)) == _facts_of(item) else None

    def _made(self, call: KnownCall, tensors: Sequence[Tensor]) -> Any:
        made = [None if known is None else self._tensor(known, tensors) for known in call.results]
        return made[0] if call.container is None else call.container(made)

    def _tensor(self, known: _KnownResult, tensors: Sequence[Tensor]) -> Tensor:
        given, memory, shape, stride, offset, dtype, device = known
        if given is not None:
            return tensors[given]
        made = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        if memory is not None:
            made.set_(tensors[memory].untyped_storage(), offset, shape, stride)
        return FakeTensor(self._mode, made, device)  # type: ignore[no-any-return]


def _is_by_metadata(op: Any) -> bool:
    """Return whether shapes, strides and the like of what an op is given, which it leaves alone, decide on its results."""
    return isinstance(op, OpOverload) and op.namespace == "aten" and _BY_VALUE.isdisjoint(op.tags)


def _facts_of(tensor: Tensor) -> Facts | None:
    """Return what may be other about tensors without values; None for one that has no memory of its own."""
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        return None
    return (
        type(tensor),
        tensor.shape,
        tensor.stride(),
        tensor.storage_offset(),
        tensor.untyped_storage().nbytes(),
        tensor.dtype,
        tensor.device,
        tensor.requires_grad,
        tensor.is_inference(),
        tensor.is_conj(),
        tensor.is_neg(),
    )

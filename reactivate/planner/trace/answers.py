"""Answers of a real step for simulated ones: the results that only values decide.

Fake tensors have no values, so they cannot tell how many tokens go to an expert, and some ops they cannot run at all. A
step that ran for real has told it. A simulated step, whatever is recomputed in it, computes the same values: where fake
tensors fail, it takes the result of the call that was given the same values.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from reactivate._inspect.fake import has_no_memory
from reactivate._torch.asking import asking
from reactivate._torch.dynamo import DispatchMode
from reactivate._torch.modes import NEEDS_NUMBERS, FakeTensor, device_of, lacks_values
from reactivate._torch.ops import DEVICE_QUERY, leaves_at_op, returns_arguments
from reactivate.planner.trace.value_names import ValueNames

_ARRAYS: Any = (Tensor.numpy, Tensor.__array__)


class RealAnswers:
    """The results of the calls of a real step, by the values that they were given.

    Attributes:
        are_used: whether a simulated step has needed one.
        tell: called when one is needed that the numbers in tensors decide, and not only an op that no fake tensor can run.
    """

    def __init__(self) -> None:
        self.are_used = False
        self.tell: Callable[[], None] | None = None
        self._numbers: dict[Hashable, int] = {}
        self._found: dict[int, Any] = {}

    @contextmanager
    def recorded(self, known: Iterable[Tensor]) -> Iterator[None]:
        """Take them down, from a step that runs for real.

        Args:
            known: the tensors that are there before it.
        """
        names = ValueNames(self._numbers, known)
        with _RecordMode(names, self), _ReadMode(names, self):
            yield

    @contextmanager
    def given(self, known: Iterable[Tensor]) -> Iterator[None]:
        """Give them to a step on fake tensors.

        Args:
            known: as for the step that was recorded, in the same order.
        """
        names = ValueNames(self._numbers, known)
        has_arrays = any(isinstance(item, _Value) and isinstance(item.identity, bytes) for item in self._found.values())
        arrays = _ArrayMode(names, self) if has_arrays else nullcontext()  # a mode costs each function
        with _AnswerMode(names, self), arrays:
            try:
                yield
            finally:
                self.tell = None

    def enter(self, call: int, result: Any) -> None:
        """Take down what a real call has returned."""
        if self._found.setdefault(call, result) != result:  # random numbers have led to both
            self._found[call] = None

    def answer(self, call: int, *, is_of_data: bool = True) -> Any:
        """Return what a real call has returned; None if it is not known, or not always the same."""
        found = self._found.get(call)
        self.are_used |= found is not None
        if found is not None and is_of_data and self.tell is not None:
            self.tell()
        return found

    def as_real(self, call: int, result: Any) -> Any:
        """Return what a fake call has returned, with the strides of the real result where its own are others."""
        found = self._found.get(call)
        if not (isinstance(found, _Result) and isinstance(result, Tensor) and has_no_memory(result)):
            return result
        is_other = found.stride != result.stride() and found.shape == tuple(result.shape)
        return _made(found, result) if is_other else result


# -- modes ------------------------------------------------------------------------------------------------------------


class _Mode:
    """The part that all modes have in common: the names of values, and the answers that are taken down or given."""

    def __init__(self, names: ValueNames, answers: RealAnswers) -> None:
        super().__init__()
        self._names, self._answers = names, answers


class _RecordMode(_Mode, DispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        call = self._names.call(func, args, kwargs)
        result = func(*args, **kwargs)
        self._names.made(call, func, args, kwargs, result)
        if not returns_arguments(func):
            self._answers.enter(call, _described(result))
        return result


class _AnswerMode(_Mode, DispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is DEVICE_QUERY and isinstance(args[0], FakeTensor):
            return device_of(args[0])
        call = self._names.call(func, args, kwargs)
        try:
            result = self._answers.as_real(call, func(*args, **kwargs))
        except Exception as error:
            if not lacks_values(error):
                raise
            fakes = [leaf for leaf in leaves_at_op((args, kwargs)) if isinstance(leaf, FakeTensor)]
            # Torch says so of its own ops; any other may.
            is_of_data = isinstance(error, NEEDS_NUMBERS) or func.namespace != "aten"
            described = self._answers.answer(call, is_of_data=is_of_data) if fakes else None
            if described is None:
                raise
            result = _made(described, fakes[0])
        self._names.made(call, func, args, kwargs, result)
        return result


class _ReadMode(_Mode, TorchFunctionMode):
    """Sees what Python reads of tensors without an op: lists and arrays."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func = asking(func, kwargs)
        result = func(*args, **(kwargs or {}))
        if func is Tensor.tolist:
            _read_one_by_one(args[0])
        elif func in _ARRAYS:
            call = self._names.call(func, args, kwargs or {})
            self._answers.enter(call, _Value(result.copy(), result.tobytes()))
        return result


class _ArrayMode(_Mode, TorchFunctionMode):
    """Gives arrays to what reads them outside of recomputations, which torch runs without function modes."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func = asking(func, kwargs)
        if func in _ARRAYS and has_no_memory(args[0]):
            found = self._answers.answer(self._names.call(func, args, kwargs or {}))
            if found is not None:
                array = found.value.copy()
                weakref.finalize(array, type, args[0])  # the array of a real tensor keeps its memory
                return array
        return func(*args, **(kwargs or {}))


def _read_one_by_one(tensor: Tensor) -> None:
    """Read the items of a tensor as a fake one makes a list of them: by ops."""
    if tensor.dim() == 0:
        tensor.item()
        return
    for part in tensor:
        _read_one_by_one(part)


# -- results ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Result:
    """A tensor that a call has made, without its values."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True)
class _Value:
    """A result that is no tensor, or an array that Python has read.

    Attributes:
        value: the result.
        identity: the text or the bytes that equal ones share: 1 and True are equal, and NaN is not equal to itself.
    """

    value: Any = field(compare=False)
    identity: str | bytes


def _described(result: Any) -> Any:
    """Describe what an op has returned; None if a description is not enough to make the like."""
    if isinstance(result, (tuple, list)):
        parts = [_described(item) for item in result]
        return None if None in parts else type(result)(parts)
    if not isinstance(result, Tensor):
        return _Value(result, repr(result))
    if result.layout is not torch.strided or result.is_nested or hasattr(result, "__tensor_flatten__"):
        return None
    return _Result(tuple(result.shape), result.stride(), result.dtype, result.device)


def _made(described: Any, fake: Tensor) -> Any:
    """Make it again: tensors are fake, without values.

    Args:
        described: what an op has returned.
        fake: a fake tensor, of which others are made.
    """
    if isinstance(described, (tuple, list)):
        return type(described)(_made(item, fake) for item in described)
    if isinstance(described, _Value):
        return described.value
    return fake.new_empty_strided(described.shape, described.stride, dtype=described.dtype, device=described.device)

"""A second look at a recomputation that differs: which of its tensors hold what the function gave them.

Memory that a function gets without contents is filled with a number, to see which tensors depend on it. And an op may save
memory of its own that it fills in part: what it was called with is its caller's; torch itself can fill all else, with one
value of each dtype.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import FrameType
from typing import Any

import torch
import torch.utils.deterministic
from torch import Tensor
from torch.overrides import TorchFunctionMode

from reactivate._torch.asking import asking
from reactivate._torch.autograd import FUNCTION_APPLY_CODE
from reactivate._torch.ops import tensors_in

_settings: Any = torch.utils.deterministic
_WITHOUT_CONTENTS = frozenset(
    {
        torch.empty,
        torch.empty_like,
        torch.empty_strided,
        torch.empty_permuted,
        Tensor.new_empty,
        Tensor.new_empty_strided,
    }
)


def _value(number: int, dtype: torch.dtype) -> float:
    """Return what memory is filled with: in the place of 1 the largest number, but for indices, which have to be in range."""
    if dtype.is_floating_point or dtype.is_complex:
        return number * torch.finfo(dtype).max
    return number * (torch.iinfo(dtype).max if dtype in (torch.uint8, torch.int8) else 1)


class Filled(TorchFunctionMode):
    """Inside, tensors that code asks for without contents hold a number.

    Args:
        number: 0, or 1 for what is far from it.
        with_ops: whether torch fills all other memory too, that of ops as well.

    Attributes:
        is_used: whether there was such a tensor.
        given: the numbers of the saved tensors that ops and custom functions were called with.
    """

    def __init__(self, number: int, *, with_ops: bool = False) -> None:
        super().__init__()
        self._number, self._with_ops, self.is_used = number, with_ops, False
        self.given: set[int] = set()
        self._arguments: frozenset[int] = frozenset()  # the ids of those of the op that runs

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func = asking(func, kwargs)
        around, self._arguments = self._arguments, frozenset(map(id, tensors_in(args, kwargs or {})))
        try:
            result = func(*args, **(kwargs or {}))
        finally:
            self._arguments = around
        if func in _WITHOUT_CONTENTS and result.layout is torch.strided:
            self.is_used = True
            result.data.fill_(_value(self._number, result.dtype))  # which leaves the version as it is
        return result

    def saves(self, number: int, tensor: Tensor, frame: FrameType) -> None:
        """Autograd saves a tensor, in a frame."""
        if frame.f_code is FUNCTION_APPLY_CODE:  # of which no mode is told
            if id(tensor) in map(id, tensors_in(frame.f_locals.get("args", ()), {})):
                self.given.add(number)
        elif id(tensor) in self._arguments:
            self.given.add(number)

    def around(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that does the same inside of this."""

        @functools.wraps(fn)
        def filled(*args: Any, **kwargs: Any) -> Any:
            with self, memory_filled() if self._with_ops else nullcontext():
                return fn(*args, **kwargs)

        return filled


@contextmanager
def memory_filled() -> Iterator[None]:
    """Inside, torch fills all memory that it allocates without contents, that of ops as well: a setting of all threads."""
    mode, is_filled = torch.get_deterministic_debug_mode(), _settings.fill_uninitialized_memory
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of ops that are not deterministic
        try:
            torch.set_deterministic_debug_mode("warn")
            _settings.fill_uninitialized_memory = True
            yield
        finally:
            _settings.fill_uninitialized_memory = is_filled
            torch.set_deterministic_debug_mode(mode)


def is_of_memory_filled(tensor: Tensor) -> bool:
    """Return whether a tensor is in memory that torch fills under `memory_filled`, not in NumPy's, say."""
    with memory_filled():
        probe = torch.empty(1, device=tensor.device)
    return tensor.untyped_storage().resizable() and bool(probe.isnan())


def may_hold_fill(tensor: Tensor) -> bool:
    """Return whether an element of a tensor may be what `memory_filled` has put there."""
    if tensor.is_floating_point() or tensor.is_complex():
        return bool(tensor.isnan().any())
    return tensor.dtype is torch.bool or bool((tensor == torch.iinfo(tensor.dtype).max).any())

"""A second look at a recomputation that differs: which of its tensors hold what the function gave them.

Memory that a function gets without contents is filled with a number, to see which tensors depend on it. And an op may save
memory that it fills later, or in part: what it was called with is its caller's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from reactivate._passes.oplog import checksum
from reactivate._torch.asking import asking
from reactivate._torch.autograd import FUNCTION_APPLY_CODE
from reactivate._torch.modes import run_unseen
from reactivate._torch.ops import tensors_in

_WITHOUT_CONTENTS = frozenset(
    {
        *(torch.empty, torch.empty_like, torch.empty_strided, torch.empty_permuted),
        *(Tensor.new_empty, Tensor.new_empty_strided),
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

    Attributes:
        is_used: whether there was such a tensor.
        given: the numbers of the saved tensors that ops and custom functions were called with; ops did not write to them.
    """

    def __init__(self, number: int) -> None:
        super().__init__()
        self._number, self.is_used = number, False
        self.given: set[int] = set()
        self._arguments: frozenset[int] = frozenset()  # the ids of those of the op that runs
        self._saved: list[tuple[int, Tensor, int]] = []  # those among them that it saves, with checksums

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func = asking(func, kwargs)
        around = self._arguments, self._saved
        self._arguments, self._saved = frozenset(map(id, tensors_in(args, kwargs or {}))), []
        try:
            result = func(*args, **(kwargs or {}))
            self.given.update(number for number, tensor, bits in self._saved if run_unseen(checksum, tensor) == bits)
        finally:
            self._arguments, self._saved = around
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
            self._saved.append((number, tensor, run_unseen(checksum, tensor)))

    def around(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that does the same inside of this."""

        @functools.wraps(fn)
        def filled(*args: Any, **kwargs: Any) -> Any:
            with self:
                return fn(*args, **kwargs)

        return filled

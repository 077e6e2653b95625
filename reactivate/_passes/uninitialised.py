"""A second look at a recomputation that differs: which of its tensors hold what the function gave them.

Memory that a function gets without contents is filled with a number, to see which tensors depend on it. And an op may save
memory that it fills later, or in part: what it was called with is its caller's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from reactivate._passes.oplog import checksum
from reactivate._torch.modes import run_unseen
from reactivate._torch.ops import tensors_in

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


class Filled(TorchFunctionMode):
    """Inside, tensors that code asks for without contents hold a number.

    Args:
        number: the number.

    Attributes:
        is_used: whether there was such a tensor.
        given: the numbers of the saved tensors that ops were called with, and did not write to.
    """

    def __init__(self, number: int) -> None:
        super().__init__()
        self._number, self.is_used = number, False
        self.given: set[int] = set()
        self._arguments: frozenset[int] = frozenset()  # the ids of those of the op that runs
        self._saved: list[tuple[int, Tensor, int]] = []  # those among them that it saves, with checksums

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        around = self._arguments, self._saved
        self._arguments, self._saved = frozenset(map(id, tensors_in(args, kwargs or {}))), []
        try:
            result = func(*args, **(kwargs or {}))
            self.given.update(number for number, tensor, bits in self._saved if run_unseen(checksum, tensor) == bits)
        finally:
            self._arguments, self._saved = around
        if func in _WITHOUT_CONTENTS and result.layout is torch.strided:
            self.is_used = True
            result.data.fill_(self._number)  # which leaves the version as it is
        return result

    def saves(self, number: int, tensor: Tensor) -> None:
        """Autograd saves a tensor."""
        if id(tensor) in self._arguments:
            self._saved.append((number, tensor, run_unseen(checksum, tensor)))

    def around(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that does the same inside of this."""

        @functools.wraps(fn)
        def filled(*args: Any, **kwargs: Any) -> Any:
            with self:
                return fn(*args, **kwargs)

        return filled

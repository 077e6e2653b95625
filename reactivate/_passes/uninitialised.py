"""Memory that a function gets without contents: filled with a number, to see which tensors depend on it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

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
    """

    def __init__(self, number: int) -> None:
        super().__init__()
        self._number, self.is_used = number, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _WITHOUT_CONTENTS and result.layout is torch.strided:
            self.is_used = True
            result.data.fill_(self._number)  # which leaves the version as it is
        return result

    def around(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that does the same inside of this."""

        @functools.wraps(fn)
        def filled(*args: Any, **kwargs: Any) -> Any:
            with self:
                return fn(*args, **kwargs)

        return filled

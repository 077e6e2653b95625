"""`torch.utils.swap_tensors` refuses a tensor that has a weak reference. Whoever holds some here lets go of them first."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

LetGo = Callable[[Sequence[Tensor]], None]

_let_go: list[LetGo] = []


def before_swaps(let_go: LetGo) -> LetGo:
    """Call `let_go` with the two tensors of each swap before it."""
    if not _let_go:
        torch.utils.swap_tensors = _observed(torch.utils.swap_tensors)
    _let_go.append(let_go)
    return let_go


def _observed(swap: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(swap)
    def swap_tensors(t1: Tensor, t2: Tensor) -> Any:
        for let_go in _let_go:
            let_go((t1, t2))
        return swap(t1, t2)

    return swap_tensors

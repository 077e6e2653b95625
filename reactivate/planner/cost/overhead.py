"""The engine's own time: for a region, for a tensor saved in it, for a saved call, for seeing a function.

It is Python, and the same wherever the tensors are, so it is measured here and now, on tensors too small to count.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor

from reactivate._checkpoint import checkpoint
from reactivate.planner.profile.trace import UnitCall
from reactivate.policies import save_ops

_ROUNDS, _CALLS, _OPS = 7, 8, 8


@dataclass(frozen=True)
class Overhead:
    """Seconds of one of each, forward and recomputation together."""

    region: float
    saved_tensor: float
    saved_call: float
    function: float

    def of(self, call: UnitCall, functions: int) -> float:
        """Return the engine's own seconds for the call of a unit.

        Args:
            call: as it was traced.
            functions: how many of torch's functions it calls in sight of the engine.
        """
        return (
            self.region * call.regions
            + self.saved_tensor * call.saved_tensors
            + self.saved_call * call.saved_calls
            + self.function * functions
        )


@functools.cache
def measure_overhead() -> Overhead:
    """Measure it, in about a tenth of a second."""
    x = torch.ones(1, requires_grad=True)
    few, many = _seconds(checkpoint(_power(1)), x), _seconds(checkpoint(_power(_OPS)), x)
    plain = _seconds(_power(1), x), _seconds(_power(_OPS), x)
    seen = _seconds(checkpoint(_power(_OPS), policy=save_ops("exp")), x)
    kept = _seconds(checkpoint(_power(_OPS), policy=save_ops("mul")), x)
    tensor = max(0.0, (many - few) - 2 * (plain[1] - plain[0])) / (_OPS - 1)
    return Overhead(
        region=max(0.0, few - 2 * plain[0] - tensor),
        saved_tensor=tensor,
        saved_call=max(0.0, kept - seen) / _OPS,
        function=max(0.0, seen - many) / _OPS,
    )


def _power(ops: int) -> Callable[[Tensor], Tensor]:
    def power(x: Tensor) -> Tensor:
        result = x.exp()
        for _ in range(ops):
            result = result * x
        return result

    return power


def _seconds(function: Callable[[Tensor], Tensor], x: Tensor) -> float:
    """Of one call, forward and backward: the least of several rounds, since noise only adds."""

    def round_() -> float:
        began = perf_counter()
        for _ in range(_CALLS):
            torch.autograd.grad(function(x), x)
        return (perf_counter() - began) / _CALLS

    with torch.enable_grad():
        return min(round_() for _ in range(_ROUNDS))

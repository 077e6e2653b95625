"""The engine's own time: for a region, for a tensor saved in it, for a saved call, for seeing a function.

It is Python, on the host. For a step that runs here it is measured here, on tensors too small to count. That of another
device is in its description: a plan for it is the same wherever it is made.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from time import perf_counter

import torch
from torch import Tensor

from reactivate._checkpoint import checkpoint
from reactivate.errors import UsageError
from reactivate.planner.trace.records import UnitCall
from reactivate.policies import save_ops

_ROUNDS, _CALLS, _OPS = 7, 8, 8


@dataclass(frozen=True)
class Overhead:
    """The engine's own seconds, forward and recomputation together. The defaults are those of one core at 3 GHz.

    Attributes:
        region_seconds: of a region.
        saved_tensor_seconds: of a tensor that is saved in one.
        saved_call_seconds: of a call whose results are kept.
        function_seconds: of a function that is called in sight of the engine.

    Raises:
        UsageError: a value is none that it can have.
    """

    region_seconds: float = 9e-5
    saved_tensor_seconds: float = 5e-6
    saved_call_seconds: float = 3e-5
    function_seconds: float = 1.7e-5

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if type(value) not in (int, float) or not math.isfinite(value) or value < 0:
                raise UsageError(f"overhead: {item.name}={value!r} is not allowed. It takes a number from 0.")

    def of(self, call: UnitCall, functions: int) -> float:
        """Return the engine's own seconds for the call of a unit.

        Args:
            functions: how many of torch's functions it calls in sight of the engine.
        """
        return (
            self.region_seconds * call.regions
            + self.saved_tensor_seconds * call.saved_tensors
            + self.saved_call_seconds * call.saved_calls
            + self.function_seconds * functions
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
        region_seconds=max(0.0, few - 2 * plain[0] - tensor),
        saved_tensor_seconds=tensor,
        saved_call_seconds=max(0.0, kept - seen) / _OPS,
        function_seconds=max(0.0, seen - many) / _OPS,
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

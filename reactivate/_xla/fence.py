"""Fences: for devices whose compiler would undo a recomputation.

A lazy device records forward, recomputation and backward into one graph. Its compiler sees the same ops on the same
inputs twice, and computes them once: what was dropped is kept after all. A fence makes inputs that the compiler takes
for others, and that are there only after what stands behind the same fence.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from reactivate._torch.rng import xla_runtime


class Fence(Protocol):
    """An optimization barrier: it makes a compiler keep two computations apart.

    One of a device that records ops, and runs them later, may have a method `run(tensors)`, which runs those of some tensors.
    """

    def __call__(self, tensors: list[Tensor]) -> list[Tensor]:
        """Aliases of `tensors`, one each, without a graph: equal, and to the compiler's eyes not the same.

        All of them depend on all of `tensors`, so that nothing that reads one of them can run before the last of these is
        there. `tensors` themselves stay what they are.
        """


_fences: dict[str, Fence] = {}


def register_fence(device_type: str, fence: Fence | None) -> None:
    """Put regions on devices of this type behind `fence`; None takes it away.

    Args:
        device_type: as in `torch.device(device_type)`.
        fence: see `Fence`.

    Examples:
        >>> import reactivate
        >>> def barrier(tensors):  # of a device that compiles nothing: only what a real one does besides
        ...     return [tensor.detach().clone() for tensor in tensors]
        >>> reactivate.integrations.register_fence("meta", barrier)
        >>> reactivate.integrations.register_fence("meta", None)
    """
    if fence is None:
        _fences.pop(device_type, None)
    else:
        _fences[device_type] = fence


def fences() -> Mapping[str, Fence]:
    """{device type: its fence}, that of XLA from when torch_xla is imported on: mostly nothing."""
    if "torch_xla" in sys.modules and "xla" not in _fences and xla_runtime() is not None:
        from reactivate._xla.device import barrier  # an optional package

        _fences["xla"] = barrier
    return _fences

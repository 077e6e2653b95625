"""Fences: for devices whose compiler would undo a recomputation.

A lazy device records forward, recomputation and backward into one graph. Its compiler sees the same ops on the same
inputs twice, and computes them once: what was dropped is kept after all. A fence makes inputs that the compiler takes
for others, and that are there only after what stands behind the same fence.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from torch import Tensor

from reactivate._torch.devices import xla_runtime


class Fence(Protocol):
    """An optimization barrier: it makes a compiler keep two computations apart."""

    def __call__(self, tensors: list[Tensor]) -> list[Tensor]:
        """Aliases of `tensors`, one each, without a graph: equal, and to the compiler's eyes not the same.

        All of them depend on all of `tensors`, so that nothing that reads one of them can run before the last of these is
        there. `tensors` themselves stay what they are.
        """


@runtime_checkable
class NumberingFence(Fence, Protocol):
    """A fence whose device numbers its tensors in the order in which it makes them."""

    def number_of(self, tensor: Tensor) -> int:
        """Return the number of a tensor: later ones have higher numbers."""


@runtime_checkable
class RecordingFence(Fence, Protocol):
    """A fence whose device records ops, and runs them later, many as one program."""

    def run(self, tensors: list[Tensor]) -> None:
        """Run the ops that are recorded for these tensors.

        Raises:
            UnsupportedError: they cannot run here.
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
    if "xla" not in _fences and xla_runtime() is not None:
        from reactivate._backends.xla import barrier  # an optional package

        _fences["xla"] = barrier
    return _fences

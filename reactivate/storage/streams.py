"""Copies between a device and the host on streams of their own, beside what computes.

Rules, each of which has a test that fails without it:

1. A copy from the device waits for what computes the tensor: for an event that this stream records first.
2. The memory of a tensor that is being copied is not let go before the stream that computes waits for the copy. Code that
   gets the memory next, in the order of that stream, comes after the copy.
3. Memory for a copy to the device comes in the order of the stream that computes. The copy waits for an event that this
   stream records afterwards: what had the memory before is done with it, and so is the copy from the device (rule 2).
4. The stream that computes waits for a copy to the device before anything reads it; and before its memory is let go, if
   it is not read. So does another stream that reads it, and the memory is not given away before that has read it.
5. Memory of the host is given to another tensor together with the event of the last copy from or to it. The next copy
   waits for that event.
6. Memory of the host is unlocked only when that event is done; then, and only then, the host itself waits.

The stream that computes is that of the series (see `series.py`), whichever is current. An event is recorded once. It lives
as long as a piece, a slab or a tensor that is on its way refers to it.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor


class CopyStreams:
    """The streams of one device: one for each direction.

    Args:
        device: with its index.
    """

    def __init__(self, device: torch.device) -> None:
        self._module: Any = torch.get_device_module(device)
        self._device = device
        self._out = self._module.Stream(device)
        self._back = self._module.Stream(device)

    def take_out(self, run: Tensor, memory: Tensor, after: Any, computing: Any) -> Any:
        """Copy from the device: an event for its end.

        Args:
            run: on the device.
            memory: of the host, of the same size.
            after: the event of the last copy from or to `memory`, or None.
            computing: the stream that computes `run`.
        """
        self._out.wait_event(computing.record_event())  # rule 1
        if after is not None:
            self._out.wait_event(after)  # rule 5
        with self._module.stream(self._out):
            memory.copy_(run, non_blocking=True)
        return self._out.record_event()

    def bring_back(self, memory: Tensor, computing: Any) -> tuple[Tensor, Any]:
        """Copy to the device: the tensor, which may not be read yet, and an event for the copy's end.

        Args:
            memory: of the host.
            computing: the stream in whose order the tensor's memory comes.
        """
        with self._module.stream(computing):
            run = torch.empty(memory.shape, dtype=memory.dtype, device=self._device)
        self._back.wait_event(computing.record_event())  # rule 3
        with self._module.stream(self._back):
            run.copy_(memory, non_blocking=True)
        return run, self._back.record_event()

    def wait(self, run: Tensor, arrived: Any, computing: Any) -> None:
        """Make the stream that reads wait for a copy to the device (rule 4).

        Args:
            run: the copy.
            arrived: the event of its end.
            computing: the stream in whose order the memory came.
        """
        current = self._module.current_stream(self._device)
        current.wait_event(arrived)
        if current != computing:
            computing.wait_event(arrived)
            run.record_stream(current)


def current_stream(device: torch.device) -> Any:
    """Return the stream that computes on a device; None where there is none."""
    return torch.get_device_module(device).current_stream(device) if has_streams(device) else None


def has_streams(device: torch.device) -> bool:
    """Return whether a kind of device has streams."""
    module: Any = torch.get_device_module(device)
    return device.type != "cpu" and all(hasattr(module, name) for name in ("Stream", "stream", "current_stream"))


@functools.cache
def works_in_host_memory(device: torch.device) -> bool:
    """Return whether a device has no memory of its own."""
    properties: Any = getattr(torch.get_device_module(device), "get_device_properties", None)
    return properties is not None and bool(getattr(properties(device), "is_integrated", False))


def is_capturing(device: torch.device) -> bool:
    """Return whether a graph of the device is being captured, into which no copy of a storage may go."""
    capturing = getattr(torch.get_device_module(device), "is_current_stream_capturing", None)
    return capturing is not None and bool(capturing())

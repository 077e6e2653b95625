"""Streams on a CPU, which do nothing: torch has them so that code for accelerators runs. What they are told is observed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from reactivate._torch.private_api import Replaced


def current_stream() -> Any:
    """Return the stream in which ops on a CPU are said to run."""
    return torch.cpu.current_stream()


class StreamOrders(Replaced):
    """Tells what orders the streams of a CPU are given.

    Args:
        recorded: called with a stream and the event that is recorded in it.
        waits: called with a stream and what it waits for: an event, or another stream.
    """

    def __init__(self, recorded: Callable[[Any, Any], None], waits: Callable[[Any, Any], None]) -> None:
        self._recorded, self._waits = recorded, waits
        super().__init__(self._orders)

    def _orders(self) -> Iterator[tuple[Any, str, Any]]:
        of_accelerator = torch.accelerator.current_stream
        events: list[Any] = []

        def record_event(stream: Any, event: Any = None) -> Any:
            event = torch.cpu.Event() if event is None else event
            events[:] = [event]
            self._recorded(stream, event)
            return event

        def record(event: Any, stream: Any = None) -> None:
            self._recorded(current_stream() if stream is None else stream, event)

        def of_events(device: Any = None) -> Any:
            """In the place of an accelerator's: `fully_shard` asks it to wait for such events, which a CPU has not."""
            return current_stream() if events else of_accelerator(device)

        yield torch.cpu.Stream, "wait_stream", lambda stream, other: self._waits(stream, other)
        yield torch.cpu.Stream, "wait_event", lambda stream, event: self._waits(stream, event)
        yield torch.cpu.Stream, "record_event", record_event
        yield torch.cpu.Event, "record", record
        yield torch.accelerator, "current_stream", of_events

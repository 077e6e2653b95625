"""The time of a simulated step whose collectives run beside its compute.

Code that shards a model (`fully_shard`) gathers parameters in streams of their own, reduces gradients in others, and says
which stream waits for what. Each stream has a clock here, and so has each process group, which runs one collective at a
time. The step takes as long as the stream of its compute, which stands still while it waits for another one.

The program itself is taken to be ahead of the device, as it is where ops are large.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from reactivate._torch.streams import StreamOrders, current_stream


class StreamClock:
    """Clocks of streams and process groups, all at 0.

    Attributes:
        orders: a context in which it is told what streams wait for.
        collective_seconds: what collectives took so far.
        waited_seconds: what of that compute has waited for.
    """

    def __init__(self) -> None:
        self.orders = StreamOrders(self._recorded, self._waits)
        self.collective_seconds = self.waited_seconds = 0.0
        self._compute = current_stream()
        self._now: defaultdict[Any, float] = defaultdict(float)  # by stream, event, or name of a process group
        self._told = 0.0  # of the time of compute

    def ran(self, seconds: float, group: str = "") -> float:
        """Return by how much the step is longer with an op than without: its time, and what compute has waited before it.

        Args:
            seconds: of the op.
            group: the name of the process group that it talks to; empty if it talks to none.
        """
        stream = current_stream()
        began = max(self._now[stream], self._now[group]) if group else self._now[stream]
        self._now[stream] = began + seconds
        if group:
            self._now[group] = began + seconds
            self.collective_seconds += seconds
        if stream is not self._compute:
            return 0.0
        longer = self.rest()
        self.waited_seconds += longer if group else longer - seconds
        return longer

    def rest(self) -> float:
        """Return the time of compute that was not told yet: at the end of a step, what it waits for last."""
        told, self._told = self._told, self._now[self._compute]
        return self._told - told

    def _recorded(self, stream: Any, event: Any) -> None:
        self._now[event] = self._now[stream]

    def _waits(self, stream: Any, until: Any) -> None:
        if until is not None:
            self._now[stream] = max(self._now[stream], self._now[until])

"""A trace as a prediction: memory by what it is for, over the seconds of the step."""

from __future__ import annotations

from collections import defaultdict

from reactivate.planner.cost.alive import KEPT, MADE_IN_STEP, RECOMPUTED, WORKSPACE, alive_at_peak, kind_of
from reactivate.planner.cost.flow import Flow
from reactivate.planner.cost.prediction import LiveBytes, Prediction, thinned
from reactivate.planner.cost.reserved import reserved_for
from reactivate.planner.profile.trace import Trace

NO_COPIES = Flow()


def prediction_of(trace: Trace, fixed_bytes: int, seconds: float, flow: Flow = NO_COPIES) -> Prediction:
    """Return the prediction of the real step that a simulated one makes.

    Args:
        trace: the step.
        fixed_bytes: what is there all the time.
        seconds: what the step takes without waiting for copies, which the ops share as their costs say.
        flow: its copies.
    """
    scale = seconds / trace.seconds if trace.seconds else 0.0
    moments = []
    live = dict.fromkeys(MADE_IN_STEP, 0)
    changes = _changes(trace)
    now = forward_seconds = 0.0
    waits = flow.waits or {}
    for number, op in enumerate(trace.ops):
        for kind, size in changes.get(number, ()):
            live[kind] += size
        now += waits.get(number, 0.0) + op.seconds * scale
        if not op.is_backward:
            forward_seconds = now
        inside = op.top_bytes - op.live_bytes  # what went again while it ran
        moments.append(LiveBytes(now, live[KEPT], live[RECOMPUTED], live[WORKSPACE] + inside))
    return Prediction(
        fixed_bytes + trace.peak_bytes,
        seconds + flow.waited_seconds,
        forward_seconds,
        thinned(moments),
        flow.copies,
        flow.waited_seconds,
        alive_at_peak(trace),
        reserved_for(trace, fixed_bytes),
    )


def _changes(trace: Trace) -> dict[int, list[tuple[str, int]]]:
    """By the number of an op: what it adds to each kind of memory, and what has gone before or while it ran."""
    changes: defaultdict[int, list[tuple[str, int]]] = defaultdict(list)
    for allocation in trace.allocations:
        kind = kind_of(allocation, trace)
        changes[allocation.born].append((kind, allocation.size_bytes))
        if allocation.died is not None:
            changes[allocation.died].append((kind, -allocation.size_bytes))
    return changes

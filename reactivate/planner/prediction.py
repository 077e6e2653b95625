"""A trace as a prediction: memory over time and what its peak is made of, and the copies of a step on its clock.

A unit holds a tensor at the peak if the tensor is freed in its backward: the output of one block that the next one keeps
as its input is held by that next one. What is freed between two units is held "after" the first of them, and what
outlives the backward by the step itself.

Copies in one direction run one after the other, beside what computes. The step waits where it needs the memory of a
tensor whose copy is not done, or the tensor itself.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from reactivate._modules.paths import THE_MODEL
from reactivate.planner.contents import Copy, LiveBytes, LiveTensors, Prediction, thinned
from reactivate.planner.cost.allocator import reserved_for
from reactivate.planner.cost.links import Link
from reactivate.planner.trace.records import Allocation, CopyEvent, Origin, Trace


@dataclass(frozen=True)
class Flow:
    """The copies of a step.

    Attributes:
        copies: each of them, in the order in which they begin.
        waits: {number of an op: how long the step waits before it, in seconds}.
        stored_bytes: the most that the storage keeps.
    """

    copies: tuple[Copy, ...] = ()
    waits: Mapping[int, float] = field(default_factory=dict)
    stored_bytes: int = 0

    @property
    def waited_seconds(self) -> float:
        """Return how long the step waits for copies."""
        return sum(self.waits.values())


def time_copies(trace: Trace, link: Link | None, scale: float, *, is_awaited: bool) -> Flow:
    """Return the copies of a simulated step.

    Args:
        link: how fast they are; None if there are none.
        scale: from the seconds of its ops to those of the step.
        is_awaited: whether the program itself waits for each copy.
    """
    if link is None or not trace.moves:
        return Flow()
    clock = _Clock(link, is_awaited)
    moves: defaultdict[int, list[CopyEvent]] = defaultdict(list)
    for move in trace.moves:
        moves[move.op].append(move)
    for number in range(len(trace.ops) + 1):
        before = clock.now
        for move in moves.get(number, ()):
            clock.pass_move(move)
        if clock.now > before:
            clock.waits[number] = clock.now - before
        if number < len(trace.ops):
            clock.now += scale * trace.ops[number].seconds
    return Flow(tuple(clock.copies), clock.waits, trace.stored_bytes)


class _Clock:
    """The time of the step, and of the copies in both directions."""

    def __init__(self, link: Link, is_awaited: bool) -> None:
        self.now = 0.0
        self.copies: list[Copy] = []
        self.waits: dict[int, float] = {}
        self._link = link
        self._is_awaited = is_awaited
        self._out_ends = self._back_ends = 0.0  # of the last copy in each direction
        self._sent: dict[int, float] = {}
        self._fetched: dict[int, float] = {}

    def pass_move(self, move: CopyEvent) -> None:
        """Go on to where a transfer has come that far."""
        if move.what == "sent":
            begin = max(self.now, self._out_ends)
            self._out_ends = self._sent[move.key] = begin + self._link.out_seconds(move.nbytes)
            self.copies.append(Copy(begin, self._out_ends, move.nbytes, is_back=False))
            if self._is_awaited:
                self.now = self._out_ends
        elif move.what == "fetched":
            begin = max(self.now, self._back_ends, self._sent.get(move.key, 0.0))
            self._back_ends = self._fetched[move.key] = begin + self._link.back_seconds(move.nbytes)
            self.copies.append(Copy(begin, self._back_ends, move.nbytes, is_back=True))
        elif move.what == "settled":
            self.now = max(self.now, self._sent[move.key])
        elif move.what == "read":
            self.now = max(self.now, self._fetched[move.key])


# -- tensors at the peak ----------------------------------------------------------------------------------------------


KEPT, RECOMPUTED, WORKSPACE = MADE_IN_STEP = ("kept", "recomputed", "workspace")
THE_STEP = "the step"


def allocation_kind(allocation: Allocation, trace: Trace) -> str:
    """Return what a storage is for: "kept" for the backward, "recomputed", or "workspace"."""
    if allocation.born >= len(trace.ops):
        return WORKSPACE
    born = trace.ops[allocation.born]
    if born.is_recomputation:
        return RECOMPUTED
    if born.is_backward:
        return WORKSPACE
    died = allocation.died
    outlives = died is None or died >= len(trace.ops) or trace.ops[died].is_backward
    return KEPT if outlives else WORKSPACE


def alive_at_peak(trace: Trace) -> tuple[LiveTensors, ...]:
    """Return the tensors of which the peak of a step is made, the largest first; their bytes add up to it exactly."""
    groups: defaultdict[_AliveKind, list[tuple[str, int]]] = defaultdict(list)
    for group, holder, size_bytes in _at_peak(trace) if trace.ops else ():
        groups[group].append((holder, size_bytes))
    found = [
        LiveTensors(
            *group.origin,
            kind=group.kind,
            held_by=tuple(dict.fromkeys(holder for holder, _ in parts)),
            count=len(parts),
            nbytes=sum(size_bytes for _, size_bytes in parts),
        )
        for group, parts in groups.items()
    ]
    return tuple(sorted(found, key=lambda item: -item.nbytes))


class _AliveKind(NamedTuple):
    """The things that tensors in one row have in common: those that units hold are one, all else by its place."""

    origin: Origin
    kind: str
    outside: str


def _at_peak(trace: Trace) -> Iterator[tuple[_AliveKind, str, int]]:
    """Yield the group of each of them, who holds it, and its bytes."""
    number = max(range(len(trace.ops)), key=lambda index: trace.ops[index].top_bytes)
    op = trace.ops[number]
    for allocation in trace.allocations:
        is_alive = allocation.born <= number and (allocation.died is None or allocation.died > number)
        if is_alive and allocation.size_bytes:
            holder, is_unit = _holder(allocation, trace)
            group = _AliveKind(
                _in_any_unit(allocation, trace), allocation_kind(allocation, trace), "" if is_unit else holder
            )
            yield group, holder, allocation.size_bytes
    if op.top_bytes > op.live_bytes:  # what the op takes for itself, or frees while it runs
        place, _ = _place(trace, number)
        yield _AliveKind(Origin(f"inside of {op.name}"), WORKSPACE, place), place, op.top_bytes - op.live_bytes


def _holder(allocation: Allocation, trace: Trace) -> tuple[str, bool]:
    if allocation.died is None or allocation.died >= len(trace.ops):
        return THE_STEP, False
    return _place(trace, max(allocation.died - 1, allocation.born))  # the last op that ran while it was there


def _in_any_unit(allocation: Allocation, trace: Trace) -> Origin:
    """Return the origin with its module as a pattern: "*.mlp" in whatever unit, so that equal blocks share it."""
    origin = allocation.origin
    unit, is_unit = _place(trace, min(allocation.born, len(trace.ops) - 1))
    if not is_unit or unit == THE_MODEL:
        return origin
    return origin._replace(module=f"*{origin.module.removeprefix(unit)}")


def _place(trace: Trace, number: int) -> tuple[str, bool]:
    """Return the unit in which an op ran, or the one after which it did; and whether it ran in one."""
    op = trace.ops[number]
    paths = [call.path or THE_MODEL for call in trace.calls[op.turn]] if op.turn < len(trace.calls) else []
    index, is_inside = divmod(op.position, 2)
    if is_inside and index < len(paths):
        return paths[index], True
    if not paths:
        return THE_STEP, False
    return (f"after {paths[index - 1]}" if index else f"before {paths[0]}"), False


# -- memory over time -------------------------------------------------------------------------------------------------


NO_COPIES = Flow()


def predict(trace: Trace, fixed_bytes: int, seconds: float, flow: Flow = NO_COPIES) -> Prediction:
    """Return the prediction of the real step that a simulated one makes.

    Args:
        fixed_bytes: what is there all the time.
        seconds: what the step takes without waiting for copies, which the ops share as their costs say.
    """
    scale = seconds / trace.seconds if trace.seconds else 0.0
    moments = []
    live = dict.fromkeys(MADE_IN_STEP, 0)
    changes = _changes(trace)
    now = forward_seconds = 0.0
    for number, op in enumerate(trace.ops):
        for kind, size in changes.get(number, ()):
            live[kind] += size
        now += flow.waits.get(number, 0.0) + op.seconds * scale
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
        trace.collective_seconds,
        max(0.0, trace.collective_seconds - trace.waited_seconds),
    )


def _changes(trace: Trace) -> dict[int, list[tuple[str, int]]]:
    """By the number of an op: what it adds to each kind of memory, and what has gone before or while it ran."""
    changes: defaultdict[int, list[tuple[str, int]]] = defaultdict(list)
    for allocation in trace.allocations:
        kind = allocation_kind(allocation, trace)
        changes[allocation.born].append((kind, allocation.size_bytes))
        if allocation.died is not None:
            changes[allocation.died].append((kind, -allocation.size_bytes))
    return changes

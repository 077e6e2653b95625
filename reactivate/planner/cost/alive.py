"""The tensors that are alive at the peak of a step: what made them, what they are for, and which unit holds them.

A unit holds a tensor if the tensor is freed in its backward: the output of one block that the next one keeps as its input is
held by that next one. What is freed between two units is held "after" the first of them, and what outlives the backward by
the step itself.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from reactivate._modules.paths import THE_MODEL
from reactivate.planner.cost.prediction import LiveTensors
from reactivate.planner.profile.trace import Allocation, Origin, Trace

KEPT, RECOMPUTED, WORKSPACE = MADE_IN_STEP = ("kept", "recomputed", "workspace")
THE_STEP = "the step"


def kind_of(allocation: Allocation, trace: Trace) -> str:
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
            group = _AliveKind(_in_any_unit(allocation, trace), kind_of(allocation, trace), "" if is_unit else holder)
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

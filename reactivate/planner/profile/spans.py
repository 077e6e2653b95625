"""The figures of several calls that one region covers, each from a step in which it does."""

from __future__ import annotations

from reactivate.planner.profile.probe import Reading
from reactivate.planner.solver.chain import Candidate, Span


def span_of(name: str, path: str, start: int, stop: int, reading: Reading, plain: Reading) -> Span:
    """Return what the calls come to, each by itself, so that they add up to what they take together.

    What runs right before the first call, between the calls and right after the last may be in the region, too. So its time
    is theirs, and so is its memory, if that is more than in the plain step.

    Args:
        name: of the treatment.
        path: of the container that is treated.
        start, stop: the numbers of the first call and of the one after the last.
        reading: of the step, in which the calls right before and after these are kept.
        plain: of the plain step.
    """
    first = plain.starts_bytes[0]
    # What is other before the call in front is due to regions before it.
    others = reading.starts_bytes[start - 1] - plain.starts_bytes[start - 1] if start else 0

    def alive_at(call: int) -> int:
        return plain.starts_bytes[call] - first if call == start else reading.starts_bytes[call] - others - first

    tops = [top - others for top in _tops_of(reading)]
    if tops[2 * start] - alive_at(start) <= plain.outside_bytes[start]:
        tops[2 * start] = 0
    if tops[2 * stop] - alive_at(stop) <= plain.outside_bytes[stop]:
        tops[2 * stop] = 0
    entries = []
    for call in range(start, stop):
        around = tops[2 * call : 2 * call + 3] if call == start else tops[2 * call + 1 : 2 * call + 3]
        held = alive_at(call + 1) - alive_at(call)
        need = max(around) - alive_at(call)
        seconds = (
            max(0.0, _seconds_of(reading, start, stop) - _seconds_of(plain, start, stop)) if call == start else 0.0
        )
        entries.append(Candidate(name, seconds, held, need, span=path))
    return Span(start, tuple(entries))


def _tops_of(reading: Reading) -> list[int]:
    """Return the most that is alive at each position, the calls and what lies between."""
    first = reading.starts_bytes[0]
    tops = []
    for index, alive in enumerate(reading.starts_bytes):
        tops.append(alive - first + reading.outside_bytes[index])
        if index < len(reading.calls):
            tops.append(alive - first + reading.calls[index].need_bytes)
    return tops


def _seconds_of(reading: Reading, start: int, stop: int) -> float:
    calls = sum(call.seconds for call in reading.calls[start:stop])
    return calls + sum(reading.between_seconds[start : stop + 1])

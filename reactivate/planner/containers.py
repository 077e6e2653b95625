"""Containers: modules and spans around several units, which a plan may treat as one unit in the place of their members.

A container that is one region keeps one input for all of its members, and needs the memory of all of them at once when it
is recomputed; unless its members are regions inside of it, which are recomputed twice. What that comes to is read off
traced steps, as for units: of one of those that are alike.

Spans are 2, 4, 8, ... members of a `Sequential` in a row. Of n equal blocks, each one a region, n inputs are kept; spans
of k members keep n / k, and recompute k blocks at once, or one by one if these are regions inside of the span. With k
near the root of n that is the scheme of Chen, Xu, Zhang and Guestrin, "Training Deep Nets with Sublinear Memory Cost",
2016. Each span begins at a multiple of its length, so that there are fewer of them than members.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

from torch.nn import Module, ModuleDict, ModuleList

from reactivate._modules.paths import is_below
from reactivate._modules.spans import SequentialSpan, SpanPlace, members_of, why_without_spans
from reactivate.planner.candidates import FULL, Candidate
from reactivate.planner.solve import Option, Span
from reactivate.planner.table import CandidateTable, TraceSummary, block_class

Menus = Mapping[str, Sequence[Candidate]]


@dataclass(frozen=True)
class Container:
    """A module, or a span of a `Sequential`, around several units.

    Attributes:
        path, module: where it is, and itself.
        start, stop: the numbers of the first call of a unit in it, and of the one after the last.
        candidates: what may be done with it.
    """

    path: str
    module: Module
    start: int
    stop: int
    candidates: tuple[Candidate, ...]


def containers_in(model: Module, plain: TraceSummary) -> tuple[Container, ...]:
    """List the modules and spans around several units, but not all, whose calls follow one another, each once in a step.

    Of several around the same units, the outermost.
    """
    found: dict[tuple[int, int], Container] = {}
    for path, module, start, stop in (*_modules_in(model, plain), *spans_in(model, plain)):
        if 1 < stop - start < len(plain.paths):
            below = path if SpanPlace.of(path) is None else path.rpartition("[")[0]
            members = tuple(member.removeprefix(below).lstrip(".") for member in plain.paths[start:stop])
            candidates = (FULL, Candidate("nested recompute", ("", *members)))
            found.setdefault((start, stop), Container(path, module, start, stop, candidates))
    return tuple(found.values())


def _modules_in(model: Module, plain: TraceSummary) -> Iterator[tuple[str, Module, int, int]]:
    """Yield the modules that are called, with units inside whose calls follow one another, and the numbers of these."""
    once = {path for path in plain.paths if plain.paths.count(path) == 1}
    for path, module in model.named_modules():
        calls = [index for index, unit in enumerate(plain.paths) if path and unit != path and is_below(unit, path)]
        if not calls or isinstance(module, (ModuleList, ModuleDict)):
            continue
        start, stop = calls[0], calls[-1] + 1
        members = plain.paths[start:stop]
        if len(members) == len(calls) and once.issuperset(members) and None not in plain.treated[start:stop]:
            yield path, module, start, stop


def with_containers(
    model: Module,
    menus: Menus,
    table: CandidateTable,
    attempt: Callable[[Mapping[str, Candidate]], tuple[Any, TraceSummary]],
) -> Menus:
    """Enter into a table what the containers of a model come to, and return their candidates with those of the units.

    A container whose members are called directly comes to what the plain step does, and is left out.

    Args:
        menus: the candidates of units, by path.
        attempt: simulates a step with candidates for some modules, by their paths.
    """
    containers = containers_in(model, table.plain)
    tried = _tried(containers, table)
    for group in _apart(list(tried)):
        called = group
        for number in range(len(group[0].candidates)):  # the first is the whole: where it is no region, nothing is
            chosen = {item.path: item.candidates[number] for item in called}
            summary = attempt(chosen)[1] if chosen else table.plain
            called = [item for item in called if any(call.regions for call in summary.calls[item.start : item.stop])]
            if summary.paths == table.plain.paths:
                for item in called:
                    span = _summarize_span(item, chosen[item.path].name, summary, table.plain)
                    table.spans += [span.at(other.start, other.path) for other in tried[item]]
    return {**menus, **{item.path: item.candidates for item in containers}}


def _tried(containers: Sequence[Container], table: CandidateTable) -> dict[Container, list[Container]]:
    """Return those whose figures are read off steps, each with those that share them.

    Spans share them if they are made of equal modules that come to the same in the plain step, and of which the same can be
    recomputed. The one that is tried is apart from the others that are, where that can be, so that few steps do.
    """
    kinds: dict[object, list[Container]] = {}
    for item in containers:
        kinds.setdefault(_kind_of(item, table), []).append(item)
    found: dict[Container, list[Container]] = {}
    for alike in kinds.values():
        tried = next((item for item in alike if all(_are_apart(item, other) for other in found)), alike[0])
        found[tried] = alike
    return found


def _kind_of(item: Container, table: CandidateTable) -> object:
    if SpanPlace.of(item.path) is None:  # its own forward may do anything
        return item
    calls = list(zip(table.plain.paths, table.plain.calls))[item.start : item.stop]
    figures = tuple((call.held_bytes, call.need_bytes, table.allows(path, FULL)) for path, call in calls)
    return block_class(item.module), tuple(map(type, item.module.modules())), figures


def _apart(containers: Sequence[Container]) -> list[list[Container]]:
    """Return groups of containers that can be tried in one step: between two of them lies a call that is kept."""
    groups: list[list[Container]] = []
    for container in containers:
        for group in groups:
            if all(_are_apart(container, other) for other in group):
                group.append(container)
                break
        else:
            groups.append([container])
    return groups


def _are_apart(one: Container, other: Container) -> bool:
    return one.stop < other.start or other.stop < one.start


# -- spans of a `Sequential` ------------------------------------------------------------------------------------------


def spans_in(model: Module, plain: TraceSummary) -> Iterator[tuple[str, Module, int, int]]:
    """Yield spans of members in a row with units in them, and the numbers of the first call of a unit and of the one after.

    Their units are called one after the other, each once in a step.
    """
    counts = Counter(plain.paths)
    once = {path for path in plain.treated if path is not None and counts[path] == 1}
    for path, module in model.named_modules():
        if why_without_spans(module) or not any(unit != path and is_below(unit, path) for unit in plain.paths):
            continue
        for run in _runs(path, module, plain.paths, once):
            for first, last in _powers(len(run)):
                place = SpanPlace(path, run[first].number, run[last].number + 1)
                members = members_of(module)[place.start : place.stop]
                yield str(place), SequentialSpan(*members), run[first].start, run[last].stop


class _Member(NamedTuple):
    """A member with units in it: its number, that of the first call of a unit, and that of the one after the last."""

    number: int
    start: int
    stop: int


def _runs(path: str, sequential: Module, units: Collection[str], once: Collection[str]) -> list[list[_Member]]:
    """Return the members with units in them, split where calls do not follow one another, or a unit is not called once."""
    numbers = {name: number for number, name in enumerate(sequential._modules)}
    beginning = f"{path}." if path else ""
    names = [
        unit.removeprefix(beginning).partition(".")[0] if unit in once and unit.startswith(beginning) else None
        for unit in units
    ]
    runs: list[list[_Member]] = [[]]
    for name, group in groupby(range(len(names)), names.__getitem__):
        calls = list(group)
        if name is None:
            runs.append([])
            continue
        member = _Member(numbers[name], calls[0], calls[-1] + 1)
        if runs[-1] and runs[-1][-1].number >= member.number:
            runs.append([])
        runs[-1].append(member)
    return runs


def _powers(count: int) -> Iterator[tuple[int, int]]:
    """Yield the first and the last of 2, 4, 8, ... in a row, of so many."""
    length = 2
    while length <= count:
        yield from ((first, first + length - 1) for first in range(0, count - length + 1, length))
        length *= 2


# -- what calls in one region come to ---------------------------------------------------------------------------------


def _summarize_span(container: Container, name: str, summary: TraceSummary, plain: TraceSummary) -> Span:
    """Return what the calls in a container come to, each by itself, so that they add up to what they take together.

    What runs right before the first call, between the calls and right after the last may be in the region, too. So its time
    is theirs, and so is its memory, if that is more than in the plain step.

    Args:
        name: of the candidate.
        summary: of the step, in which the calls right before and after those of the container are kept.
    """
    start, stop = container.start, container.stop
    first = plain.starts_bytes[0]
    # What is other before the call in front is due to regions before it.
    others = summary.starts_bytes[start - 1] - plain.starts_bytes[start - 1] if start else 0
    alive = [size - others - first for size in summary.starts_bytes]
    alive[start] = plain.starts_bytes[start] - first
    tops = [top - others for top in _tops_of(summary)]
    for edge in (start, stop):
        if tops[2 * edge] - alive[edge] <= plain.outside_bytes[edge]:
            tops[2 * edge] = 0
    seconds = max(0.0, _seconds_of(summary, start, stop) - _seconds_of(plain, start, stop))
    entries = []
    for call in range(start, stop):
        need = max(tops[2 * call + (call > start) : 2 * call + 3]) - alive[call]
        own_seconds = seconds if call == start else 0.0
        entries.append(Option(name, own_seconds, alive[call + 1] - alive[call], need, span=container.path))
    return Span(start, tuple(entries))


def _tops_of(summary: TraceSummary) -> list[int]:
    """Return the most that is alive at each position, the calls and what lies between."""
    starts, calls = summary.starts_bytes, [call.need_bytes for call in summary.calls]
    pairs = zip(starts, summary.outside_bytes, [*calls, 0])
    return [start - starts[0] + need for start, *needs in pairs for need in needs][: 2 * len(calls) + 1]


def _seconds_of(summary: TraceSummary, start: int, stop: int) -> float:
    calls = sum(call.seconds for call in summary.calls[start:stop])
    return calls + sum(summary.between_seconds[start : stop + 1])

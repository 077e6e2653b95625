"""Spans of a `Sequential` that a plan may treat as one: 2, 4, 8, ... of its members in a row.

Of n equal blocks, each one a region, n inputs are kept. Spans of k members keep n / k, and recompute the others with all that
is in between: k blocks at once, or one by one if these are regions inside of the span. With k near the root of n that is
the scheme of Chen, Xu, Zhang and Guestrin, "Training Deep Nets with Sublinear Memory Cost", 2016. The planner chooses among
powers of two, each beginning at a multiple of itself, so that there are fewer of them than members.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from itertools import groupby
from typing import NamedTuple

from torch.nn import Module

from reactivate._modules.spans import SequentialSpan, SpanPlace, members_of, why_without_spans
from reactivate.planner.profile.probe import Reading


def spans_in(model: Module, plain: Reading) -> Iterator[tuple[str, Module, int, int]]:
    """Yield spans of members in a row with units in them, and the numbers of the first call of a unit and of the one after.

    Their units are called one after the other, each once in a step.

    Args:
        model: the model.
        plain: the plain step.
    """
    counts = Counter(plain.paths)
    once = {path for path in plain.treated if path is not None and counts[path] == 1}
    around = {above for path in plain.paths for above in _above(path)}
    for path, module in model.named_modules():
        if path not in around or why_without_spans(module):
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


def _above(path: str) -> Iterator[str]:
    """Yield the paths of the modules around one."""
    while path:
        path = path.rpartition(".")[0]
        yield path

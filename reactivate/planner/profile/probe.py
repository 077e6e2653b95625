"""The memory and time of each treatment of each unit: read off simulated steps.

A step in which every unit has some treatment tells, of each unit, how much more is alive after it than before, the most
that is alive while it runs, forward or backward, and what its ops take. As many steps as there are treatments tell all
of that exactly; `rounds` says how fewer do.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch.nn import Module

from reactivate.planner.cost.overhead import Overhead
from reactivate.planner.profile.trace import Trace
from reactivate.planner.solver.chain import Candidate, Chain, Span, Transfer
from reactivate.planner.treatments import FULL, KEEP, Treatment


@dataclass(frozen=True)
class Figures:
    """Of the call of a unit under one treatment, or of what runs between two calls.

    Attributes:
        held_bytes: how much more is alive when the next call begins than when this one did.
        need_bytes: the most that is alive while it runs, above what the calls before it hold.
        seconds: what its ops and the engine take.
        forward_seconds: what its ops take in the forward.
        moved: the bytes of each of its tensors that a storage takes, in one pass.
        passes: how many passes over the model there are.
        regions: how many regions there are in it, or end right after it.
    """

    held_bytes: int
    need_bytes: int
    seconds: float
    forward_seconds: float = 0.0
    moved: tuple[int, ...] = ()
    passes: int = 1
    regions: int = 0


@dataclass(frozen=True)
class Reading:
    """The measures of one simulated step.

    Attributes:
        paths: the units in the order in which they are called; one that is called twice is there twice.
        calls: what each call comes to.
        outside_bytes: for k = 0, 1, ...: the most that is alive between the calls, above what the first k hold.
        peak_bytes: the most that is alive at any moment.
        treated: the unit of each call that has a treatment; None for a call without gradients.
        starts_bytes: what is alive when each call begins, and after the last.
        between_seconds: for k = 0, 1, ...: what the ops between the calls take, in their forward and backward.
    """

    paths: tuple[str, ...]
    calls: tuple[Figures, ...]
    outside_bytes: tuple[int, ...]
    peak_bytes: int
    treated: tuple[str | None, ...] = ()
    starts_bytes: tuple[int, ...] = ()
    between_seconds: tuple[float, ...] = ()


def read(trace: Trace, scale: float, overhead: Overhead, sees_functions: Mapping[str, int]) -> Reading:
    """Read a trace. Of several passes over the model (micro-batches), the most that one of them comes to.

    Args:
        trace: the step.
        scale: from the seconds of ops to those of the step.
        overhead: what the engine takes.
        sees_functions: for units with a policy that looks at functions, how many these are.
    """
    turns = [list(_read_turn(trace, turn)) for turn in range(len(trace.calls))]
    longest = max(range(len(turns)), key=lambda turn: len(trace.calls[turn]), default=None)
    if longest is None:
        return Reading((), (), (trace.peak_bytes,), trace.peak_bytes)
    paths = tuple(call.path for call in trace.calls[longest])
    same = [found for turn, found in enumerate(turns) if tuple(call.path for call in trace.calls[turn]) == paths]
    count = len(paths)
    calls = []
    for index in range(count):
        rows = [found[2 * index + 1] for found in same]
        call = trace.calls[longest][index]
        engine = overhead.of(call, sees_functions.get(call.path, 0))
        calls.append(
            Figures(
                max(row[0] for row in rows),
                max(row[1] for row in rows),
                scale * sum(row[2] for row in rows) + engine,
                scale * sum(row[3] for row in rows),
                tuple(call.moved),
                len(same),
                call.regions,
            )
        )
    outside = tuple(max(found[2 * index][1] for found in same) for index in range(count + 1))
    treated = tuple(call.path if call.has_gradients else None for call in trace.calls[longest])
    starts = tuple(max(found[2 * index][4] for found in same) for index in range(count + 1))
    between = tuple(scale * sum(found[2 * index][2] for found in same) for index in range(count + 1))
    return Reading(paths, tuple(calls), outside, trace.peak_bytes, treated, starts, between)


def _read_turn(trace: Trace, turn: int) -> Iterator[tuple[int, int, float, float, int]]:
    """(held, need, seconds, those of them in the forward, alive when the next call begins) for each position, in order."""
    calls = trace.calls[turn]
    starts = [call.live_bytes for call in calls]
    ops = [op for op in trace.ops if op.turn == turn]
    last = 2 * len(calls)
    after = next((op.start_bytes for op in ops if op.position == last and not op.is_backward), None)
    if after is None:  # nothing runs after the last unit
        after = next((op.start_bytes for op in ops if op.is_backward), starts[-1])
    starts.append(after)
    first = starts[0]
    tops = [0] * (last + 1)
    seconds, forward = [0.0] * (last + 1), [0.0] * (last + 1)
    for op in ops:
        tops[op.position] = max(tops[op.position], op.top_bytes)
        seconds[op.position] += op.seconds
        forward[op.position] += 0.0 if op.is_backward else op.seconds
    for position in range(last + 1):
        index = position // 2
        held = starts[index + 1] - starts[index] if position % 2 else 0
        # What was alive before the first unit is no unit's, and is needed all the time.
        yield held, tops[position] - starts[index] + first, seconds[position], forward[position], starts[index]


def class_of(unit: Module) -> object:
    """Return what equal blocks have in common: the class, and the names, shapes and dtypes of the parameters."""
    facts = tuple((name, tuple(item.shape), item.dtype, item.requires_grad) for name, item in unit.named_parameters())
    return type(unit), facts


class Copies(Protocol):
    """The costs of copies to a storage and back."""

    @property
    def limit_bytes(self) -> int | None:
        """Return the most bytes that the storage may keep; None for any number."""

    @property
    def in_flight(self) -> int:
        """Return how many tensors may be on their way to it; 0 where the program waits for each copy."""

    def of(self, moved: Sequence[int], passes: int) -> tuple[Transfer, float]:
        """Return what tensors of these sizes take of the storage and of its link, and of the program itself, in seconds."""


class TreatmentTable:
    """Every unit's treatments, with their figures.

    Args:
        plain: the reading of the plain step.
        units: by path.

    Attributes:
        spans: what may be done with several calls as one.
    """

    def __init__(self, plain: Reading, units: Mapping[str, Module]) -> None:
        self.plain = plain
        self.spans: list[Span] = []
        self._classes = {path: (class_of(unit), plain.treated.count(path)) for path, unit in units.items()}
        # Of a path or a class, by the treatment's name: changes.
        self._found: dict[tuple[object, str], Figures] = {}

    def enter(self, reading: Reading, treatments: Mapping[str, Treatment]) -> None:
        """Take in a step in which units had these treatments."""
        if reading.paths != self.plain.paths:
            return
        for path in dict.fromkeys(self.plain.treated):
            if path is not None and path in treatments:
                change = self._of(reading, path)
                for key in (path, self._classes[path]):
                    self._found.setdefault((key, treatments[path].name), change)

    def class_of(self, path: str) -> object:
        """Return what a unit has in common with those that it shares its figures with: `class_of`, and how many calls."""
        return self._classes[path]

    def beside(self, plain: Reading) -> TreatmentTable:
        """Return the table for another plain step, from which treatments differ by as much.

        Args:
            plain: its reading.
        """
        other = copy.copy(self)
        other.plain = plain
        return other

    def _of(self, reading: Reading, path: str) -> Figures:
        """Return what differs from the plain step, of all calls of a unit."""
        calls = zip(self.plain.treated, reading.calls, self.plain.calls)
        pairs = [pair for name, *pair in calls if name == path]
        return Figures(
            sum(one.held_bytes - other.held_bytes for one, other in pairs),
            max(one.need_bytes - other.need_bytes for one, other in pairs),
            sum(one.seconds - other.seconds for one, other in pairs),
            sum(one.forward_seconds - other.forward_seconds for one, other in pairs),
            tuple(size for one, _ in pairs for size in one.moved),
            max(one.passes for one, _ in pairs),
        )

    def chain(
        self,
        menus: Mapping[str, Sequence[Treatment]],
        corrections: Mapping[int, int],
        copies: Copies | None = None,
    ) -> Chain:
        """The problem to solve.

        Args:
            menus: what may be done with each unit.
            corrections: bytes to add at a position, where simulated plans showed them.
            copies: what the copies of treatments that use a storage cost.
        """
        seen: set[str | None] = set()
        blocks: list[tuple[Candidate, ...]] = []
        for index, (path, plain) in enumerate(zip(self.plain.treated, self.plain.calls)):
            more = corrections.get(2 * index + 1, 0)
            if path is None or path in seen:  # decided where it is called first, which holds for all calls
                most = 0 if path is None else max(self._known(path, item).need_bytes for item in menus[path])
                blocks.append((Candidate(KEEP.name, 0.0, plain.held_bytes, plain.need_bytes + max(most, 0) + more),))
                continue
            seen.add(path)
            blocks.append(tuple(self._entry(path, plain, item, more, copies) for item in menus[path]))
        outside = [size + corrections.get(2 * index, 0) for index, size in enumerate(self.plain.outside_bytes)]
        if copies is None:
            return Chain(tuple(blocks), tuple(outside), spans=tuple(self.spans))
        return Chain(tuple(blocks), tuple(outside), copies.limit_bytes, copies.in_flight)

    def _entry(self, path: str, plain: Figures, treatment: Treatment, more: int, copies: Copies | None) -> Candidate:
        change = self._known(path, treatment)
        forward = max(0.0, plain.forward_seconds + change.forward_seconds)
        transfer, costs = copies.of(change.moved, change.passes) if copies and change.moved else (None, 0.0)
        return Candidate(
            treatment.name,
            max(0.0, change.seconds) + costs,
            plain.held_bytes + change.held_bytes,
            plain.need_bytes + change.need_bytes + more,
            forward,
            max(0.0, plain.seconds + change.seconds - forward),
            transfer,
        )

    def _known(self, path: str, treatment: Treatment) -> Figures:
        found = self.change(path, treatment)
        assert found is not None
        return found

    def change(self, path: str, treatment: Treatment) -> Figures | None:
        """Return what differs from the plain step with a treatment of a unit; None if nobody has tried it."""
        if treatment == KEEP:
            return Figures(0, 0, 0.0)
        found = self._found.get((path, treatment.name))
        return self._found.get((self._classes[path], treatment.name)) if found is None else found

    def are_alike(self, paths: Sequence[str]) -> bool:
        """Return whether units of one class come to the same in the plain step, and where everything is recomputed."""
        return len({(self._plain_of(path), self.change(path, FULL)) for path in paths}) == 1

    def _plain_of(self, path: str) -> tuple[Figures, ...]:
        return tuple(figures for name, figures in zip(self.plain.paths, self.plain.calls) if name == path)

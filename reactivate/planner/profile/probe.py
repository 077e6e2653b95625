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
from reactivate.planner.profile.call_numbers import CallKey, keys_of
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
        numbers: how many calls of the unit there were before each in the forward of the model; None for calls that have none.
        uncounted: the units of which calls with gradients have none.
        starts_bytes: what is alive when each call begins, and after the last.
        between_seconds: for k = 0, 1, ...: what the ops between the calls take, in their forward and backward.
    """

    paths: tuple[str, ...]
    calls: tuple[Figures, ...]
    outside_bytes: tuple[int, ...]
    peak_bytes: int
    numbers: tuple[int | None, ...] = ()
    uncounted: frozenset[str] = frozenset()
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
    numbers = tuple(call.number for call in trace.calls[longest])
    starts = tuple(max(found[2 * index][4] for found in same) for index in range(count + 1))
    between = tuple(scale * sum(found[2 * index][2] for found in same) for index in range(count + 1))
    return Reading(paths, tuple(calls), outside, trace.peak_bytes, numbers, trace.uncounted, starts, between)


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
        keys: what decides about each call.
        spans: what may be done with several calls as one.
    """

    def __init__(self, plain: Reading, units: Mapping[str, Module]) -> None:
        self.plain = plain
        self.keys: tuple[CallKey, ...] = tuple(keys_of(plain.paths, plain.numbers, plain.uncounted))
        self.spans: list[Span] = []
        self._classes = {path: class_of(unit) for path, unit in units.items()}
        # Of the call of a path or a class, by the treatment's name: changes.
        self._found: dict[tuple[object, int | None, str], Figures] = {}

    def enter(self, reading: Reading, treatments: Mapping[str, Treatment]) -> None:
        """Take in a step in which units had these treatments."""
        if reading.paths != self.plain.paths:
            return
        for call in dict.fromkeys(self.keys):
            if call.path in treatments:
                change = self._of(reading, call, self.plain)
                for key in (call.path, self._classes[call.path]):
                    self._found.setdefault((key, call.number, treatments[call.path].name), change)

    def beside(self, plain: Reading) -> TreatmentTable:
        """Return the table for another plain step, from which treatments differ by as much.

        Args:
            plain: its reading.
        """
        other = copy.copy(self)
        other.plain = plain
        return other

    def _of(self, reading: Reading, key: CallKey, plain: Reading) -> Figures:
        """Return what differs from the plain step; of calls that have one treatment, in all."""
        pairs = [pair for name, *pair in zip(self.keys, reading.calls, plain.calls) if name == key]
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
        seen: set[CallKey] = set()
        blocks: list[tuple[Candidate, ...]] = []
        for index, (key, plain) in enumerate(zip(self.keys, self.plain.calls)):
            more = corrections.get(2 * index + 1, 0)
            menu = menus[key.path] if key.number is not None else (KEEP,)  # without gradients there is nothing to treat
            if key in seen:  # decided where it is called first, which holds for both
                most = max(self._known(key, item).need_bytes for item in menu)
                blocks.append((Candidate(KEEP.name, 0.0, plain.held_bytes, plain.need_bytes + max(most, 0) + more),))
                continue
            seen.add(key)
            blocks.append(tuple(self._entry(key, plain, item, more, copies) for item in menu))
        outside = [size + corrections.get(2 * index, 0) for index, size in enumerate(self.plain.outside_bytes)]
        if copies is None:
            return Chain(tuple(blocks), tuple(outside), spans=tuple(self.spans))
        return Chain(tuple(blocks), tuple(outside), copies.limit_bytes, copies.in_flight)

    def _entry(self, key: CallKey, plain: Figures, treatment: Treatment, more: int, copies: Copies | None) -> Candidate:
        change = self._known(key, treatment)
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

    def _known(self, key: CallKey, treatment: Treatment) -> Figures:
        found = self._change(key, treatment)
        assert found is not None
        return found

    def _change(self, key: CallKey, treatment: Treatment) -> Figures | None:
        if treatment == KEEP:
            return Figures(0, 0, 0.0)
        found = self._found.get((key.path, key.number, treatment.name))
        return self._found.get((self._classes[key.path], key.number, treatment.name)) if found is None else found

    def are_alike(self, paths: Sequence[str]) -> bool:
        """Return whether units of one class come to the same in the plain step, and where everything is recomputed."""
        return len({(self._plain_of(path), tuple(self.changes(path, FULL))) for path in paths}) == 1

    def _plain_of(self, path: str) -> tuple[tuple[int | None, Figures], ...]:
        return tuple((key.number, figures) for key, figures in zip(self.keys, self.plain.calls) if key.path == path)

    def changes(self, path: str, treatment: Treatment) -> list[Figures | None]:
        """Return what differs from the plain step with a treatment of a unit, for each call; None if nobody has tried it."""
        keys = dict.fromkeys(key for key in self.keys if key.path == path and key.number is not None)
        return [self._change(key, treatment) for key in keys]

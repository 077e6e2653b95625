"""The memory and time of each treatment of each unit: read off simulated steps.

A step in which every unit has some treatment tells, of each unit, how much more is alive after it than before, the most
that is alive while it runs, forward or backward, and what its ops take. As many steps as there are treatments tell all
of that exactly. Where a model has many equal blocks, each step tries several treatments on different ones of them, and
what was found for one is taken for the others.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch.nn import Module

from reactivate.planner.cost.overhead import Overhead
from reactivate.planner.profile.trace import Trace
from reactivate.planner.solver.chain import Candidate, Chain, Transfer
from reactivate.planner.treatments import FULL, KEEP, Treatment

REPEATED = 4  # equal blocks, of which each step tries several treatments


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
    """

    held_bytes: int
    need_bytes: int
    seconds: float
    forward_seconds: float = 0.0
    moved: tuple[int, ...] = ()
    passes: int = 1


@dataclass(frozen=True)
class Reading:
    """The measures of one simulated step.

    Attributes:
        paths: the units in the order in which they are called; one that is called twice is there twice.
        calls: what each call comes to.
        outside_bytes: for k = 0, 1, ...: the most that is alive between the calls, above what the first k hold.
        peak_bytes: the most that is alive at any moment.
    """

    paths: tuple[str, ...]
    calls: tuple[Figures, ...]
    outside_bytes: tuple[int, ...]
    peak_bytes: int


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
            )
        )
    outside = tuple(max(found[2 * index][1] for found in same) for index in range(count + 1))
    return Reading(paths, tuple(calls), outside, trace.peak_bytes)


def _read_turn(trace: Trace, turn: int) -> Iterator[tuple[int, int, float, float]]:
    """(held, need, seconds, those of them in the forward) for each position, in order."""
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
        yield held, tops[position] - starts[index] + first, seconds[position], forward[position]


# -- which treatments to try where ------------------------------------------------------------------------------------


def rounds_of(
    units: Mapping[str, Module], menus: Mapping[str, Sequence[Treatment]], *, least: bool = True
) -> list[dict[str, Treatment]]:
    """List the steps to simulate: a treatment for each unit, several times over.

    Args:
        units: the units that are called.
        menus: the treatments of each; `KEEP` needs no step of its own.
        least: whether to begin with a step in which every unit is recomputed.
    """
    classes: dict[object, list[str]] = {}
    for path, unit in units.items():
        classes.setdefault(_class_of(unit), []).append(path)
    groups = [
        group
        for members in classes.values()
        for group in ([members] if len(members) >= REPEATED else [[member] for member in members])
    ]
    rounds = [dict.fromkeys(units, FULL)] if units and least else []  # for the least that is needed: exactly
    first = len(rounds)
    for members in groups:
        tries = [item for item in menus[members[0]] if item not in (KEEP, FULL)]
        for start in range(0, len(tries), len(members)):
            number = first + start // len(members)
            if number == len(rounds):
                rounds.append({})
            rounds[number].update(zip(members, tries[start : start + len(members)]))
    return rounds


def _class_of(unit: Module) -> object:
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
    """

    def __init__(self, plain: Reading, units: Mapping[str, Module]) -> None:
        self.plain = plain
        self._classes = {path: _class_of(unit) for path, unit in units.items()}
        self._found: dict[tuple[object, str], Figures] = {}  # of a path or a class, by the treatment's name: changes

    def enter(self, reading: Reading, treatments: Mapping[str, Treatment]) -> None:
        """Take in a step in which units had these treatments."""
        if reading.paths != self.plain.paths:
            return
        for path in treatments:
            change = self._of(reading, path, self.plain)
            for key in (path, self._classes[path]):
                self._found.setdefault((key, treatments[path].name), change)

    def beside(self, plain: Reading) -> TreatmentTable:
        """Return the table for another plain step, from which treatments differ by as much.

        Args:
            plain: its reading.
        """
        other = copy.copy(self)
        other.plain = plain
        return other

    @staticmethod
    def _of(reading: Reading, path: str, plain: Reading) -> Figures:
        """Return what differs from the plain step; of a unit that is called several times, in all."""
        pairs = [pair for name, *pair in zip(reading.paths, reading.calls, plain.calls) if name == path]
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
        seen: set[str] = set()
        blocks: list[tuple[Candidate, ...]] = []
        for index, (path, plain) in enumerate(zip(self.plain.paths, self.plain.calls)):
            more = corrections.get(2 * index + 1, 0)
            if path in seen:  # decided where it is called first, which holds for both
                most = max(self._known(path, item).need_bytes for item in menus[path])
                blocks.append((Candidate(KEEP.name, 0.0, plain.held_bytes, plain.need_bytes + max(most, 0) + more),))
                continue
            seen.add(path)
            blocks.append(tuple(self._entry(path, plain, item, more, copies) for item in menus[path]))
        outside = [size + corrections.get(2 * index, 0) for index, size in enumerate(self.plain.outside_bytes)]
        if copies is None:
            return Chain(tuple(blocks), tuple(outside))
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
        """Return what differs from the plain step where a unit has a treatment; None if nobody has tried it."""
        if treatment == KEEP:
            return Figures(0, 0, 0.0)
        found = self._found.get((path, treatment.name))
        return self._found.get((self._classes[path], treatment.name)) if found is None else found

"""The memory and time of each candidate of each unit, read off traced steps.

A step in which every unit has some candidate tells, of each unit, how much more is alive after it than before, the most
that is alive while it runs, forward or backward, and what its ops take. As many steps as there are candidates tell all of
that exactly. Where a model has many equal blocks, each step tries several candidates on different ones of them, and what
was found for one is taken for the others. Of few equal blocks the first or the last may be most of them: their candidates
are shared out only if the blocks come to the same, to the byte, in the plain step and in that in which every unit is
recomputed.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import NamedTuple

from torch.nn import Module

from reactivate._text.warnings import warn
from reactivate.planner.candidates import FULL, KEEP, Candidate
from reactivate.planner.cost.overhead import Overhead
from reactivate.planner.offload import Offer
from reactivate.planner.solve import Chain, Option, Span
from reactivate.planner.trace.records import Trace

REPEATED = 4  # equal blocks that are many

_OTHER_CALLS = (
    "plan: the step called other blocks when it ran again, so nothing is known of some ways to recompute them: the plan is "
    "slower than it could be, or there is none. A step must call the same blocks each time: let nothing in it depend on "
    "files, clocks or random numbers from outside of Python."
)


@dataclass(frozen=True)
class CallSummary:
    """The call of a unit under one candidate.

    Attributes:
        held_bytes: how much more is alive when the next call begins than when this one did.
        need_bytes: the most that is alive while it runs, above what the calls before it hold.
        seconds, forward_seconds: of its ops and the engine; of its ops in the forward.
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
class TraceSummary:
    """The calls of units in one traced step.

    Attributes:
        paths: the units in the order in which they are called; one that is called twice is there twice.
        calls: what each call comes to.
        outside_bytes: for k = 0, 1, ...: the most that is alive between the calls, above what the first k hold.
        treated: the unit of each call that has candidates; None for a call without gradients.
        starts_bytes: what is alive when each call begins, and after the last.
        between_seconds: for k = 0, 1, ...: of the ops between the calls, in their forward and backward.
    """

    paths: tuple[str, ...]
    calls: tuple[CallSummary, ...]
    outside_bytes: tuple[int, ...]
    treated: tuple[str | None, ...] = ()
    starts_bytes: tuple[int, ...] = ()
    between_seconds: tuple[float, ...] = ()


def summarize(trace: Trace, scale: float, overhead: Overhead, seen_functions: Mapping[str, int]) -> TraceSummary:
    """Summarize a traced step. Of several passes over the model (micro-batches), take the most that one of them comes to.

    Args:
        scale: from the seconds of ops to those of the step.
        seen_functions: for units with a policy that looks at functions, how many these are.
    """
    passes = [list(_positions_of(trace, turn)) for turn in range(len(trace.calls))]
    longest = max(trace.calls, key=len, default=None)
    if longest is None:
        return TraceSummary((), (), (trace.peak_bytes,))
    paths = tuple(call.path for call in longest)
    same = [found for found, turn in zip(passes, trace.calls) if tuple(call.path for call in turn) == paths]
    columns = (zip(*rows) for rows in zip(*same))
    positions = [
        _AtPosition(max(held), max(need), scale * sum(seconds), scale * sum(forward), max(start))
        for held, need, seconds, forward, start in columns
    ]
    calls = []
    for call, at in zip(longest, positions[1::2]):
        seconds = at.seconds + overhead.of(call, seen_functions.get(call.path, 0))
        moved = tuple(call.moved)
        calls.append(CallSummary(at.held, at.need, seconds, at.forward, moved, len(same), call.regions))
    between = positions[::2]
    return TraceSummary(
        paths,
        tuple(calls),
        tuple(at.need for at in between),
        tuple(call.path if call.has_gradients else None for call in longest),
        tuple(at.start for at in between),
        tuple(at.seconds for at in between),
    )


class _AtPosition(NamedTuple):
    """A call of a unit, or what runs between two: bytes held and needed, seconds, forward seconds, bytes at its start."""

    held: int
    need: int
    seconds: float
    forward: float
    start: int


def _positions_of(trace: Trace, turn: int) -> Iterator[_AtPosition]:
    """Yield what each position of one pass comes to."""
    calls = trace.calls[turn]
    starts = [call.live_bytes for call in calls]
    ops = [op for op in trace.ops if op.turn == turn]
    last = 2 * len(calls)
    after = next((op.start_bytes for op in ops if op.position == last and not op.is_backward), None)
    if after is None:  # nothing runs after the last unit
        after = next((op.start_bytes for op in ops if op.is_backward), starts[-1])
    starts.append(after)
    tops, seconds, forward = [0] * (last + 1), [0.0] * (last + 1), [0.0] * (last + 1)
    for op in ops:
        tops[op.position] = max(tops[op.position], op.top_bytes)
        seconds[op.position] += op.seconds
        forward[op.position] += 0.0 if op.is_backward else op.seconds
    for position in range(last + 1):
        start = starts[position // 2]
        held = starts[position // 2 + 1] - start if position % 2 else 0
        # What was alive before the first unit is no unit's, and is needed all the time.
        yield _AtPosition(held, tops[position] - start + starts[0], seconds[position], forward[position], start)


def block_class(unit: Module) -> object:
    """Return what equal blocks have in common: the class, and the names, shapes and dtypes of the parameters."""
    facts = tuple((name, tuple(item.shape), item.dtype, item.requires_grad) for name, item in unit.named_parameters())
    return type(unit), facts


class CandidateTable:
    """Every unit's candidates, with what they change.

    Args:
        refused: the paths of the regions that cannot be recomputed; those that are found later are added to it.

    Attributes:
        spans: what may be done with several calls as one.
    """

    def __init__(self, plain: TraceSummary, units: Mapping[str, Module], refused: Set[str] = frozenset()) -> None:
        self.plain = plain
        self.spans: list[Span] = []
        self._refused = refused
        self._classes = {
            path: (block_class(unit), plain.treated.count(path), path in refused) for path, unit in units.items()
        }
        self._changes: dict[tuple[object, str], CallSummary] = {}  # by a path or a class, and the candidate's name
        self._tried: set[tuple[str, str]] = set()  # by the path and the candidate's name

    def enter(self, summary: TraceSummary, candidates: Mapping[str, Candidate]) -> None:
        """Take in a step in which units had these candidates."""
        self._tried |= {(path, item.name) for path, item in candidates.items()}
        if summary.paths != self.plain.paths:
            warn(_OTHER_CALLS)
            return
        for path in dict.fromkeys(self.plain.treated):
            if path is not None and path in candidates and self.allows(path, candidates[path]):
                change = self._change_in(summary, path)
                for key in (path, self._classes[path]):
                    self._changes.setdefault((key, candidates[path].name), change)

    def _change_in(self, summary: TraceSummary, path: str) -> CallSummary:
        """Return what differs from the plain step, of all calls of a unit."""
        calls = zip(self.plain.treated, summary.calls, self.plain.calls)
        pairs = [pair for name, *pair in calls if name == path]
        return CallSummary(
            sum(one.held_bytes - other.held_bytes for one, other in pairs),
            max(one.need_bytes - other.need_bytes for one, other in pairs),
            sum(one.seconds - other.seconds for one, other in pairs),
            sum(one.forward_seconds - other.forward_seconds for one, other in pairs),
            tuple(size for one, _ in pairs for size in one.moved),
            max(one.passes for one, _ in pairs),
        )

    def allows(self, path: str, candidate: Candidate) -> bool:
        """Return whether no region of a unit's candidate is refused."""
        return self._refused.isdisjoint(candidate.regions(path))

    def change(self, path: str, candidate: Candidate) -> CallSummary | None:
        """Return what differs from the plain step with a candidate of a unit; None if it was not tried, or is refused."""
        if candidate == KEEP:
            return CallSummary(0, 0, 0.0)
        if not self.allows(path, candidate):
            return None
        found = self._changes.get((path, candidate.name))
        return self._changes.get((self._classes[path], candidate.name)) if found is None else found

    def beside(self, plain: TraceSummary) -> CandidateTable:
        """Return the table for another plain step, from which candidates differ by as much."""
        other = copy.copy(self)
        other.plain = plain
        return other

    def chain(
        self, menus: Mapping[str, Sequence[Candidate]], corrections: Mapping[int, int], offer: Offer | None = None
    ) -> Chain:
        """Return the problem to solve.

        Args:
            menus: the candidates of each unit.
            corrections: bytes to add at a position, where traced plans showed them.
            offer: the storage that some candidates use.
        """
        seen: set[str | None] = set()
        blocks: list[tuple[Option, ...]] = []
        for index, (path, plain) in enumerate(zip(self.plain.treated, self.plain.calls)):
            more = corrections.get(2 * index + 1, 0)
            known = {} if path is None else self._known(path, menus[path])
            if path is None or path in seen:  # decided where it is called first, which holds for all calls
                most = max((0, *(change.need_bytes for change in known.values())))
                blocks.append((Option(KEEP.name, 0.0, plain.held_bytes, plain.need_bytes + most + more),))
                continue
            seen.add(path)
            blocks.append(tuple(self._option(plain, item, change, more, offer) for item, change in known.items()))
        outside = [size + corrections.get(2 * index, 0) for index, size in enumerate(self.plain.outside_bytes)]
        if offer is None:
            spans = tuple(span for span in self.spans if self._allows_span(span, menus))
            return Chain(tuple(blocks), tuple(outside), spans=spans)
        return Chain(tuple(blocks), tuple(outside), offer.limit_bytes, offer.in_flight)

    def _allows_span(self, span: Span, menus: Mapping[str, Sequence[Candidate]]) -> bool:
        """Return whether no region of a span is refused, as far as that is known by now."""
        first = span.options[0]
        return all(self.allows(first.span, item) for item in menus[first.span] if item.name == first.name)

    def _known(self, path: str, menu: Sequence[Candidate]) -> dict[Candidate, CallSummary]:
        """Return the candidates of a unit that a plan may have, with what differs from the plain step."""
        changes = {item: self.change(path, item) for item in menu}
        return {item: change for item, change in changes.items() if change is not None}

    def _option(
        self, plain: CallSummary, candidate: Candidate, change: CallSummary, more: int, offer: Offer | None
    ) -> Option:
        forward = max(0.0, plain.forward_seconds + change.forward_seconds)
        transfer, costs = offer.of(change.moved, change.passes) if offer and change.moved else (None, 0.0)
        return Option(
            candidate.name,
            max(0.0, change.seconds) + costs,
            plain.held_bytes + change.held_bytes,
            plain.need_bytes + change.need_bytes + more,
            forward,
            max(0.0, plain.seconds + change.seconds - forward),
            transfer,
        )

    # -- units that share what was found ------------------------------------------------------------------------------

    def groups(self) -> Iterator[list[str]]:
        """Yield the units that share what is found: those of a class that are many, or come to the same; else each alone.

        They come to the same if they do in the plain step, and where everything is recomputed.
        """
        classes: dict[object, list[str]] = {}
        for path, kind in self._classes.items():
            classes.setdefault(kind, []).append(path)
        calls = list(zip(self.plain.paths, self.plain.calls))
        for members in classes.values():
            plain = [tuple(call for name, call in calls if name == path) for path in members]
            figures = set(zip(plain, (self.change(path, FULL) for path in members)))
            is_shared = len(members) >= REPEATED or len(figures) == 1
            yield from [members] if is_shared else [[member] for member in members]

    def left_to_try(self, paths: Sequence[str], candidate: Candidate) -> list[str]:
        """List the units, of some that share what is found, that can try a candidate of which nothing is known."""
        if candidate == KEEP or any((path, candidate.name) in self._changes for path in paths):
            return []
        return [path for path in paths if self.allows(path, candidate) and (path, candidate.name) not in self._tried]


def plan_rounds(menus: Mapping[str, Sequence[Candidate]], table: CandidateTable) -> list[dict[str, Candidate]]:
    """List the steps to trace: a candidate for each unit in each. Empty once all that can be tried are known.

    A step may tell that a unit cannot be recomputed in this way. Then an equal unit that can has to try it: call it again.

    Args:
        menus: the candidates of each unit; `KEEP` needs no step.
        table: has the plain step, and that in which every unit is recomputed.
    """
    rounds: list[dict[str, Candidate]] = []
    for group in table.groups():
        for candidate in dict.fromkeys(item for path in group for item in menus[path]):
            able = table.left_to_try([path for path in group if candidate in menus[path]], candidate)
            if not able:
                continue
            if all(path in tried for tried in rounds for path in able):
                rounds.append({})
            tried = next(tried for tried in rounds if not tried.keys() >= set(able))
            tried[next(path for path in able if path not in tried)] = candidate
    return rounds

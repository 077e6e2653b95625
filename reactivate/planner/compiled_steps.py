"""Steps whose blocks are compiled, run for real: the memory and the time of each block, read between their calls.

Nothing sees the ops of compiled code, and no fake tensor runs it. It can be seen when a block is called and returns, and,
by its tensors, when its backward begins and ends. What is alive at these moments, and the most between two of them, is
all that a plan needs: a stretch between two moments stands for an op in a trace.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module

from reactivate._model.apply import apply
from reactivate._modules.paths import is_below
from reactivate._passes.observing import observed_by
from reactivate._region.accounts import is_shortage
from reactivate._text.warnings import warn
from reactivate._torch.dynamo import called_through, has_budgets_in_graphs, own_call_of, with_many_graphs
from reactivate._torch.ops import flatten
from reactivate.errors import MutationError, RecomputeMismatchError
from reactivate.planner.candidates import FULL, KEEP, SHARES, Assignment, Candidate, without_refused
from reactivate.planner.compiled import Call, CompiledModules
from reactivate.planner.cost.stretches import Stretch, marked
from reactivate.planner.progress import Tell
from reactivate.planner.step import BLOCKS, TrainingStep
from reactivate.planner.table import block_class
from reactivate.planner.target import Target
from reactivate.planner.trace.data_scope import DataMargin
from reactivate.planner.trace.positions import UnitPosition, is_in_backward
from reactivate.planner.trace.records import Allocation, Op, Origin, Trace, UnitCall
from reactivate.planner.trace.refused import RefusedRegions

TIMED = 5  # steps of each policy, of which the least time counts
_MOST_GRAPHS = 256


class Place(NamedTuple):
    """A stretch of a step.

    Attributes:
        turn, position, is_backward: as of an `Op`.
    """

    turn: int
    position: int
    is_backward: bool


class CompiledSteps:
    """Runs one step with its blocks compiled, under any candidates of its units.

    Args:
        step, target, units: what runs, where, and the model's units by their paths.
        refused: the paths of the regions that cannot be recomputed; those that are found here are added to it.
    """

    def __init__(
        self, step: TrainingStep, target: Target, units: Mapping[str, Module], tell: Tell, refused: set[str]
    ) -> None:
        self._step, self._target, self._units, self._tell, self._refused = step, target, units, tell, refused
        self._modules = CompiledModules(step.model, BLOCKS)
        self._tried: dict[object, bool] = {}
        self._kinds = {path: block_class(unit) for path, unit in units.items()}
        self._seconds: dict[tuple[object, str], tuple[float, float]] = {}  # by kind and candidate: forward, backward
        self._between: dict[Place, float] = {}
        torch.compiler.reset()  # code of the same blocks that was compiled before counts against what one function may have

    # -- candidates ---------------------------------------------------------------------------------------------------

    def menu(self, path: str) -> tuple[Candidate, ...] | None:
        """Return the candidates of a unit that is compiled; None for one that is not.

        Regions around parts of it, or that save calls, are none: the compiler tells them apart by identity, and would make a
        graph for each block, of which it keeps eight. These here are one graph each, for all equal blocks.
        """
        unit = self._units[path]
        if not self._modules.has(unit):
            return None
        if path in self._refused:  # nor can the compiler recompute what it is given
            return (KEEP,)
        return (KEEP, FULL, *(SHARES if self._may_share(path, unit) else ()))

    def _may_share(self, path: str, unit: Module) -> bool:
        """Return whether the compiler can be told what to keep: it must make one graph of the unit, and of nothing else."""
        kind = self._kinds[path]
        if kind not in self._tried:
            self._tried[kind] = has_budgets_in_graphs and unit in self._modules.calls and self._takes_shares(path)
        return self._tried[kind]

    def _takes_shares(self, path: str) -> bool:
        """Return whether a step runs in which a unit has a share, since it does without."""
        self._tell("what the compiler keeps of a block, tried")
        try:
            self.run({path: SHARES[0]})
        except RuntimeError as error:
            if is_shortage(error):
                raise
            torch.compiler.reset()  # it has given up on code that other blocks run as well
            kind, reason = type(self._units[path]).__name__, " ".join(str(error).split())
            warn(
                f'plan(compiled="blocks"): of a {kind} ({path}) the compiler cannot be told how much to keep, so it is '
                "planned without that. It must make one graph of the block, of ops of the model alone. It said: "
                f"{reason[:300]}"
            )
            return False
        return True

    def margin(self, found: DataMargin) -> DataMargin:
        """Return the room for other batches, of units: nothing tells what in them depends on the data."""
        units = (
            unit for unit in self._units if any(is_below(path, unit) or is_below(unit, path) for path in found.paths)
        )
        return replace(found, paths=frozenset(units))

    # -- steps --------------------------------------------------------------------------------------------------------

    def run(self, candidates: Mapping[str, Candidate]) -> Trace:
        """Return the step with candidates for some units, by path: it is compiled, and runs for real."""
        known = frozenset(self._refused)
        with self._applied(candidates) as allowed:
            memory = self._watch(takes_memory=True)
            is_known = all((self._kinds.get(path), item.name) in self._seconds for path, item in allowed.items())
            seconds = self._known(memory, allowed) if is_known else _least(self._watch() for _ in range(TIMED))
        found = _traced(memory, seconds)
        found.failures += [f"{path} is refused" for path in sorted(self._refused - known)]
        return found

    def time(self, menus: Mapping[str, Sequence[Candidate]]) -> None:
        """Find out what each candidate takes: of all equal blocks at once, since a difference of one is lost in the noise.

        One step of each after the other, and again, so that whatever else runs on the machine meets all of them.
        """
        most = max(map(len, menus.values()))
        policies = [{path: menu[turn % len(menu)] for path, menu in menus.items()} for turn in range(most)]
        found: list[list[_WatchedRun]] = [[] for _ in policies]
        for turn in range(TIMED):
            for number, candidates in enumerate(policies):
                self._tell(f"policies, compiled and timed: {turn * most + number + 1} of {TIMED * most}")
                with self._applied(candidates, is_first=turn == 0):
                    found[number].append(self._watch())
        for candidates, runs in zip(policies, found, strict=True):
            self._take(self._allowed(candidates), runs[0], _least(runs))
        self._between = {place: seconds for place, seconds in _least(found[0]).items() if not place.position % 2}

    def _take(self, candidates: Mapping[str, Candidate], run: _WatchedRun, seconds: Mapping[Place, float]) -> None:
        """Take the mean of equal units in a step in which each has the same candidate."""
        passes: dict[tuple[object, str], list[tuple[float, float]]] = {}
        for place, path in run.units():
            both = seconds.get(place, 0.0), seconds.get(place._replace(is_backward=True), 0.0)
            passes.setdefault((self._kinds[path], candidates.get(path, KEEP).name), []).append(both)
        for key, times in passes.items():
            forward, backward = (sum(parts) / len(times) for parts in zip(*times))
            self._seconds[key] = forward, backward

    def _known(self, run: _WatchedRun, candidates: Mapping[str, Candidate]) -> Mapping[Place, float]:
        seconds = dict(self._between)
        for place, path in run.units():
            forward, backward = self._seconds[self._kinds[path], candidates.get(path, KEEP).name]
            seconds[place], seconds[place._replace(is_backward=True)] = forward, backward
        return seconds

    @contextmanager
    def _applied(self, candidates: Mapping[str, Candidate], *, is_first: bool = True) -> Iterator[dict[str, Candidate]]:
        """Apply the candidates without a refused region inside of the context, and yield them.

        The first time, the step runs until no region is refused that was not before: then what it runs is compiled.
        """
        while is_first and self._refuses(self._allowed(candidates)):
            pass
        allowed = self._allowed(candidates)
        with apply(self._step.model, Assignment(allowed)), with_many_graphs(_MOST_GRAPHS):
            yield allowed

    def _refuses(self, candidates: Mapping[str, Candidate]) -> bool:
        """Run the step compiled, and return whether one of its regions is refused, which is then known."""
        policy, seen = Assignment(candidates), RefusedRegions()
        try:
            with (
                apply(self._step.model, policy),
                with_many_graphs(_MOST_GRAPHS),
                self._modules.running(),
                observed_by(seen),
            ):
                self._step.run_for_real()
        except (MutationError, RecomputeMismatchError) as error:
            if isinstance(error, MutationError):
                seen.end()
            if seen.paths.isdisjoint(policy.regions):
                raise
        refused = seen.paths.intersection(policy.regions)
        self._refused |= refused
        return bool(refused)

    def _allowed(self, candidates: Mapping[str, Candidate]) -> dict[str, Candidate]:
        return without_refused(candidates, self._refused)

    def _watch(self, *, takes_memory: bool = False) -> _WatchedRun:
        found: list[_WatchedRun] = []

        def watch(run: Callable[[], None]) -> None:
            with marked(self._target.device, takes_memory=takes_memory) as (mark, stretches):
                look = _WatchedRun(mark, stretches)
                with observed_by(look), self._watched(look):
                    run()
            found.append(look)

        self._step.run_for_real(watch=watch)
        return found[0]

    @contextmanager
    def _watched(self, look: _WatchedRun) -> Iterator[None]:
        paths = {module: path for path, module in self._units.items()}

        def watched(module: Module, call: Call) -> Call:
            return look.watched(paths[module], call) if module in paths else call

        others = {module: look.watched(path, own_call_of(module)) for module, path in paths.items()}
        with called_through(others), self._modules.running(watched):
            yield


class _WatchedRun:
    """One run of a step: its stretches, and the calls of units.

    Args:
        mark: tells that a stretch ends and the next one begins.
        stretches: those, when the run is over.
    """

    def __init__(self, mark: Callable[[], None], stretches: list[Stretch]) -> None:
        self.places = [Place(0, 0, is_backward=False)]
        self.stretches = stretches
        self._mark = mark
        self._position = UnitPosition()
        self.calls = self._position.calls

    @property
    def seconds(self) -> dict[Place, float]:
        """The seconds at each place."""
        found: dict[Place, float] = {}
        for place, stretch in zip(self.places, self.stretches, strict=True):
            found[place] = found.get(place, 0.0) + stretch.seconds
        return found

    def units(self) -> Iterator[tuple[Place, str]]:
        """Yield the place of the forward of each call of a unit, and its path."""
        for turn, calls in enumerate(self.calls):
            for number, call in enumerate(calls):
                yield Place(turn, 2 * number + 1, is_backward=False), call.path

    def watched(self, path: str, call: Call) -> Call:
        """Return a call of a unit that is looked at."""

        def watch(*args: Any, **kwargs: Any) -> Any:
            if is_in_backward():
                return call(*args, **kwargs)
            self._look_at(args, kwargs)
            begun = self._position.unit_begins(path)
            if begun is not None:
                self._move()
                begun.op = len(self.places) - 1
            try:
                result = call(*args, **kwargs)
            finally:
                self._position.unit_ends()
            self._move()
            self._look_at(result)
            return result

        return watch

    def _move(self) -> None:
        place = Place(*self._position.now())
        if place != self.places[-1]:
            self.places.append(place)
            self._mark()

    def _look_at(self, *values: Any) -> None:
        """Look when the gradients of tensors are there: then the backward of what made them begins."""
        for leaf in flatten(values)[0]:
            if isinstance(leaf, Tensor) and leaf.grad_fn is not None:
                leaf.register_hook(lambda _: self._move())

    def forward_done(self, region: Any) -> None:
        """A region that the engine runs, around several blocks, is over."""
        if self.calls and not is_in_backward():
            self.calls[-1][-1].regions += 1

    def recomputation_done(self, region: Any) -> None:
        """A region was recomputed."""


def _least(runs: Iterable[_WatchedRun]) -> dict[Place, float]:
    """Return the least seconds at each place of several runs: other programs only add to it."""
    times = [run.seconds for run in runs]
    return {place: min(found[place] for found in times) for place in times[0]}


def _traced(memory: _WatchedRun, seconds: Mapping[Place, float]) -> Trace:
    """Return the trace of a step that was looked at for its memory."""
    left = dict(seconds)  # a place may have several stretches: the first one gets the time
    ops = [
        Op(*place, False, *stretch[:3], left.pop(place, 0.0), _NAMES[place.position % 2])
        for place, stretch in zip(memory.places, memory.stretches, strict=True)
    ]
    calls = [[replace(call, live_bytes=ops[call.op].start_bytes) for call in turn] for turn in memory.calls]
    return Trace(ops, [], calls, _allocations(ops, calls), is_real=True)


_NAMES = "code between blocks", "compiled code"  # at even positions, and at odd ones


def _allocations(ops: Sequence[Op], calls: Sequence[Sequence[UnitCall]]) -> list[Allocation]:
    """Return allocations that come to what is alive at each stretch: what came last goes first."""
    found: list[Allocation] = []
    alive: list[Allocation] = []
    before = 0
    for number, op in enumerate(ops):
        more, before = op.live_bytes - before, op.live_bytes
        path = calls[op.turn][op.position // 2].path if op.position % 2 else ""
        if more > 0:
            alive.append(Allocation(more, number, origin=Origin(op.name, path), place=path))
            found.append(alive[-1])
        while more < 0 and alive:
            last = alive.pop()
            if last.size_bytes > -more:
                alive.append(replace(last, size_bytes=last.size_bytes + more))
                found.append(alive[-1])
                last.size_bytes = -more
            last.died, more = number, more + last.size_bytes
    return found

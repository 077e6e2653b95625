"""One model: peers and plans, their peaks, and their times in the same rounds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from _frontier_results import Frontier, Peer, PlanContents, Settings, Verdict, verdicts
from _frontier_steps import (
    SHARES,
    Plans,
    Ready,
    applied,
    budget_of,
    compiled_peers,
    compiled_plans,
    does,
    make_plans,
    optimum_of,
    peers_by_block,
    plans_by_block,
    ready,
)
from _presentation import describe_machine
from _subjects import ON_ACCELERATORS, SIZES, SIZES_BY_BLOCK, make_subject
from _timing import SINGLE, Estimate, Key, Timer, Times, Track, estimate, finished, quiet, single_calls
from _training import EVERY, Subject, Way, torch_ways
from _ways import OURS

from reactivate.planner.cost.measured import time_call
from reactivate.planner.plan import Plan


def measure_model(name: str, settings: Settings, device: torch.device, track: Track) -> Frontier:
    """The frontier of a model, and what others have in its place."""
    on_cpu = SIZES | (SIZES_BY_BLOCK if settings.by_block else {})
    sizes = (on_cpu if device.type == "cpu" else ON_ACCELERATORS) | settings.sizes
    subject = make_subject(name, sizes[name], device, by_block=settings.by_block)
    ways, runs = torch_ways(subject.blocks_of, EVERY), [Way(OURS, "", lambda model: model)]
    backend = settings.backend if settings.by_block else ""
    if settings.by_block:
        ways, runs = peers_by_block(subject, backend), [plans_by_block(subject, backend)]
    elif name in settings.compiled:
        ways += compiled_peers(subject, settings.backend)
        runs += compiled_plans(subject, settings.backend)
    timer = Timer(device, settings.clock if device.type == "cpu" else "wall")
    with quiet():
        theirs = steps_of("peers", ways, subject, device, track, by_block=settings.by_block)
        peaks = {way.name: theirs[way.name].peak_bytes for way in ways}
        tick = track(f"{name}, plans", len(ways) + len(SHARES) + 1)
        plans = make_plans(subject, peaks, theirs[ways[0].name].peak_bytes, tick, by_block=backend)
        if settings.by_block:  # planning makes torch's compiler forget what it has compiled
            theirs = steps_of("peers, again", ways, subject, device, track, by_block=True)
        like = theirs[ways[0].name] if settings.by_block else None
        ours = steps_of("planned steps", planned_ways(plans, runs), subject, device, track, like)
        steps = [*theirs.values(), *ours.values()]
        calls = {item.key: finished(item.step, device) for item in steps}

        def judged(times: Times) -> _Judged:
            peers = [_peer(way, theirs[way.name], times) for way in ways]
            planned = [
                _planned(run.system, label, plan, ours[replace(run, mode=plans.name_of(label)).name], times)
                for run in runs
                for label, plan in plans.found.items()
            ]
            return _judged(peers, planned, times)

        most = rounds_in(steps, settings, device)
        rounds, found = in_sittings(
            lambda count: single_calls(calls, count, timer, track(f"{name}, rounds", count)),
            *(judged, settings, most),
        )
    return Frontier(
        machine=describe_machine(device),
        settings=settings,
        model=name,
        title=subject.title,
        parameters=sum(parameter.numel() for parameter in subject.model.parameters()),
        rounds=rounds,
        fixed_bytes=plans.fixed_bytes,
        least_bytes=plans.least_bytes,
        planning_seconds=plans.first_seconds,
        replanning_seconds=plans.median_seconds,
        **vars(found),
        optimum=optimum_of(name, device),
    )


@dataclass(frozen=True)
class _Judged:
    peers: list[Peer]
    planned: list[PlanContents]
    verdicts: list[Verdict]
    verdicts_with_compiled: list[Verdict]

    def are_narrow(self, width: float) -> bool:
        """Return whether no verdict's interval is wider."""
        ratios = [item.ratio for item in (*self.verdicts, *self.verdicts_with_compiled) if item.ratio is not None]
        return all(ratio.high - ratio.low <= width for ratio in ratios)


def _judged(peers: list[Peer], planned: list[PlanContents], times: Times) -> _Judged:
    eager = [peer for peer in peers if not peer.is_compiled] or peers  # every one is, where blocks are
    eagerly = [item for item in planned if item.system == OURS]
    alone = [*verdicts(eager, eagerly, times)]
    return _Judged(peers, planned, alone, [] if eager == peers else [*verdicts(peers, planned, times)])


def in_sittings(
    measure: Callable[[int], Times], judge: Callable[[Times], _Judged], settings: Settings, most: int
) -> tuple[int, _Judged]:
    """Measure a quarter of the rounds at a time, until every verdict is as narrow as is asked for.

    Returns:
        The number of rounds, and what all of them say.
    """
    times = measure(max(settings.fewest, most // 4))
    while True:
        rounds, found = len(next(iter(times.values()))), judge(times)
        left = most - rounds
        if left <= 0 or found.are_narrow(settings.width):
            return rounds, found
        more = measure(min(left, max(1, most // 4)))
        times = {key: np.concatenate([times[key], more[key]]) for key in times}


def steps_of(
    what: str,
    ways: list[Way],
    subject: Subject,
    device: torch.device,
    track: Track,
    like: Ready | None = None,
    *,
    by_block: bool = False,
) -> dict[str, Ready]:
    """{the name of the way: its step}.

    Args:
        like: the step that they are compared with; None for the plain one.
        by_block: whether they are compared with the first of them.
    """
    tick, found = track(f"{subject.name}, {what}", len(ways)), {}
    for way in ways:
        item = ready(way.name, subject, way.make, device, way.first, like)
        if by_block and like is None:
            like = item = replace(item, differences=[])
        found[way.name] = item
        tick()
    return found


def planned_ways(plans: Plans, runs: list[Way]) -> list[Way]:
    """Run what is planned in each of these ways; budgets with the same plan share one."""
    different = {plans.name_of(label): plan for label, plan in plans.found.items()}
    return [
        replace(run, mode=label, make=lambda model, run=run, plan=plan: run.make(applied(plan, model)))
        for run in runs
        for label, plan in different.items()
    ]


def _peer(way: Way, step: Ready, times: Times) -> Peer:
    return Peer(
        *(way.system, way.mode, way.is_compiled, step.peak_bytes, _level(step.key, times)),
        *(step.first_seconds, step.differences),
    )


def _planned(system: str, label: str, plan: Plan, step: Ready, times: Times) -> PlanContents:
    name, _ = step.key
    return PlanContents(
        system=system,
        label=label,
        step=name,
        budget_bytes=budget_of(plan),
        promised_bytes=plan.predicted.peak_bytes - plan.fixed.total,
        promised_seconds=plan.predicted.seconds,
        peak_bytes=step.peak_bytes,
        seconds=_level(step.key, times),
        holds=step.peak_bytes <= budget_of(plan),
        does=does(plan),
        differences=step.differences,
    )


def _level(key: Key, times: Times) -> Estimate:
    return estimate(lambda view: view.level(key), times, SINGLE)


def rounds_in(steps: Sequence[Ready], settings: Settings, device: torch.device) -> int:
    """Return how many rounds of all steps the settings' seconds have room for."""
    once = sum(time_call(item.step, device) for item in steps)
    return max(settings.fewest, min(settings.most, round(settings.seconds / once)))

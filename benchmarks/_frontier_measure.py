"""One model: peers and plans, their peaks, and their times in the same rounds."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from _figures import SINGLE, Estimate, Key, Times, estimate
from _frontier_compiled import compiled_peers, compiled_plans
from _frontier_models import ON_ACCELERATORS, SIZES, SMALL, Subject, make_subject
from _frontier_optimum import against_every_choice, measured_chain
from _frontier_peers import Call, Way, eager_peers
from _frontier_plans import SHARES, Plans, applied, budget_of, does, make_plans
from _frontier_results import Frontier, Optimum, Peer, Planned, Settings
from _frontier_steps import Ready, ready, rounds_in
from _frontier_verdicts import verdicts
from _measure import Timer, quiet, single_calls
from _results import Track, describe_machine
from _selective_block import finished
from _subjects import OURS
from torch import nn

from reactivate.planner.plan import Plan


def measure_model(name: str, settings: Settings, device: torch.device, track: Track, sac_ilp: list[str]) -> Frontier:
    """The frontier of a model, and what others have in its place."""
    sizes = (SIZES if device.type == "cpu" else ON_ACCELERATORS) | settings.sizes
    subject = make_subject(name, sizes[name], device)
    ways, runs = eager_peers(subject), [Way(OURS, "", lambda model: model)]
    if name in settings.compiled:
        ways += compiled_peers(subject, settings.backend)
        runs += compiled_plans(subject, settings.backend)
    timer = Timer(device, settings.clock if device.type == "cpu" else "wall")
    with quiet():
        theirs = steps_of("peers", ways, subject, device, track)
        peaks = {way.name: theirs[way.name].peak_bytes for way in ways}
        tick = track(f"{name}, plans", len(ways) + len(SHARES) + 1)
        plans = make_plans(subject, peaks, theirs[ways[0].name].peak_bytes, tick)
        ours = steps_of("planned steps", planned_ways(plans, runs), subject, device, track)
        steps = [*theirs.values(), *ours.values()]
        rounds = rounds_in(steps, settings, device)
        calls = {item.key: finished(item.step, device) for item in steps}
        times = single_calls(calls, rounds, timer, track(f"{name}, rounds", rounds))
    peers = [_peer(way, theirs[way.name], times) for way in ways]
    planned = [
        _planned(run.system, label, plan, ours[replace(run, mode=plans.name_of(label)).name], times)
        for run in runs
        for label, plan in plans.found.items()
    ]
    eager = [peer for peer in peers if not peer.is_compiled]
    eagerly = [item for item in planned if item.system == OURS]
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
        peers=peers,
        planned=planned,
        verdicts=[*verdicts(eager, eagerly, times)],
        verdicts_with_compiled=[] if eager == peers else [*verdicts(peers, planned, times)],
        optimum=optimum_of(name, device),
        sac_ilp=sac_ilp,
    )


def steps_of(what: str, ways: list[Way], subject: Subject, device: torch.device, track: Track) -> dict[str, Ready]:
    """{the name of the way: its step}."""
    tick, found = track(f"{subject.name}, {what}", len(ways)), {}
    for way in ways:
        found[way.name] = ready(way.name, subject, way.make, device, way.first)
        tick()
    return found


def planned_ways(plans: Plans, runs: list[Way]) -> list[Way]:
    """Run what is planned in each of these ways; budgets with the same plan share one."""
    different = {plans.name_of(label): plan for label, plan in plans.found.items()}
    return [
        replace(run, mode=label, make=partial(_planned_run, plan, run))
        for run in runs
        for label, plan in different.items()
    ]


def _planned_run(plan: Plan, run: Way, model: nn.Module) -> Call:
    return run.make(applied(plan, model))


def optimum_of(name: str, device: torch.device) -> Optimum:
    """The solver against every choice, on a small model of the same kind."""
    return against_every_choice(measured_chain(make_subject(name, SMALL[name], device), device))


def _peer(way: Way, step: Ready, times: Times) -> Peer:
    return Peer(
        *(way.system, way.mode, way.is_compiled, step.peak_bytes, _level(step.key, times)),
        *(step.first_seconds, step.differences),
    )


def _planned(system: str, label: str, plan: Plan, step: Ready, times: Times) -> Planned:
    name, _ = step.key
    return Planned(
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

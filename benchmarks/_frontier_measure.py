"""One model: peers and plans, their peaks, and their times in the same rounds; who is faster in equal memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from _frontier_steps import (
    SHARES,
    Optimum,
    Plans,
    Ready,
    applied,
    budget_of,
    compiled_peers,
    compiled_plans,
    does,
    make_plans,
    optimum_of,
    ready,
)
from _presentation import Record, describe_machine
from _timing import SINGLE, Estimate, Key, Timer, Times, Track, estimate, finished, quiet, single_calls
from _training import EVERY, ON_ACCELERATORS, SIZES, Size, Subject, Way, make_subject, torch_ways
from _ways import OURS

from reactivate.planner.plan import Plan
from reactivate.planner.profile.costs import seconds_of

FASTER, SAME, SLOWER, NO_PLAN = "faster", "not separable", "slower", "no plan fits"


# -- results ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Settings:
    """Settings: how long to measure, and what.

    Attributes:
        seconds: of rounds, for a model.
        fewest, most: rounds, whatever the seconds.
        backend: of compiled peers.
        compiled: the models with compiled peers.
        clock: "cpu" or "wall"; on an accelerator always "wall".
        sizes: by model; of models that are not in there as the script has them.
    """

    seconds: float = 150.0
    fewest: int = 7
    most: int = 40
    backend: str = "inductor"
    compiled: tuple[str, ...] = ()
    clock: str = "cpu"
    sizes: dict[str, Size] = field(default_factory=dict)


@dataclass(frozen=True)
class Peer:
    """A step of the model as others have it.

    Attributes:
        peak_bytes: the most that is allocated, over parameters, gradients and inputs.
        seconds: the median over the rounds.
        first_seconds: on the wall, of the first step: with what is compiled in it.
        differences: what a step leaves different from plain, bit for bit.
    """

    system: str
    mode: str
    is_compiled: bool
    peak_bytes: int
    seconds: Estimate
    first_seconds: float
    differences: list[str]

    @property
    def name(self) -> str:
        return f"{self.system}: {self.mode}"


@dataclass(frozen=True)
class Planned:
    """A step of the model with a plan. Sizes are over parameters, gradients and inputs.

    Attributes:
        system: whether it runs eagerly, or what of it is compiled.
        label: the budget in words.
        step: the name of what was measured: budgets with the same plan share one.
        budget_bytes: what was allowed.
        promised_bytes, promised_seconds: what the plan says.
        peak_bytes, seconds, differences: what was found, as in `Peer`.
        holds: whether the peak is within the budget.
        does: {what is done: with how many parts of the model}.
    """

    system: str
    label: str
    step: str
    budget_bytes: int
    promised_bytes: int
    promised_seconds: float
    peak_bytes: int
    seconds: Estimate
    holds: bool
    does: dict[str, int]
    differences: list[str]


@dataclass(frozen=True)
class Verdict:
    """A plan against the fastest peer, in equal memory.

    Attributes:
        budget_of: the peer whose peak is the budget.
        rival: the fastest peer whose peak is within it.
        system: how the plan for it runs: the fastest way that stays within it.
        ratio: the plan's time as a part of the rival's; None where no plan fits.
        words: "faster", "not separable" or "slower", by the interval; or "no plan fits".
        holds: whether the plan's step stays within the budget; None where no plan fits.
    """

    budget_of: str
    budget_bytes: int
    rival: str
    system: str
    ratio: Estimate | None
    words: str
    holds: bool | None


@dataclass(frozen=True)
class Frontier(Record):
    """The findings on one model.

    Attributes:
        fixed_bytes: parameters, buffers, gradients and inputs.
        least_bytes: the least budget for which there is a plan, over these.
        planning_seconds, replanning_seconds: on the wall: of the first plan, and of each further one in the median.
        verdicts: eager peers and eager plans alone.
        verdicts_with_compiled: every peer and every plan; empty where none was compiled.
    """

    explained = {"method": SINGLE.describe}  # noqa: RUF012
    settings: Settings
    model: str
    title: str
    parameters: int
    rounds: int
    fixed_bytes: int
    least_bytes: int
    planning_seconds: float
    replanning_seconds: float
    peers: list[Peer]
    planned: list[Planned]
    verdicts: list[Verdict]
    verdicts_with_compiled: list[Verdict]
    optimum: Optimum

    @property
    def benchmark(self) -> str:  # type: ignore[override]
        """The first part of the names of its files."""
        return f"frontier-{self.model}"


# -- measuring --------------------------------------------------------------------------------------------------------


def measure_model(name: str, settings: Settings, device: torch.device, track: Track) -> Frontier:
    """The frontier of a model, and what others have in its place."""
    sizes = (SIZES if device.type == "cpu" else ON_ACCELERATORS) | settings.sizes
    subject = make_subject(name, sizes[name], device)
    ways, runs = torch_ways(subject.blocks_of, EVERY), [Way(OURS, "", lambda model: model)]
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
        replace(run, mode=label, make=lambda model, run=run, plan=plan: run.make(applied(plan, model)))
        for run in runs
        for label, plan in different.items()
    ]


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


def rounds_in(steps: Sequence[Ready], settings: Settings, device: torch.device) -> int:
    """Return how many rounds of all steps the settings' seconds have room for."""
    once = sum(seconds_of(item.step, device) for item in steps)
    return max(settings.fewest, min(settings.most, round(settings.seconds / once)))


# -- verdicts ---------------------------------------------------------------------------------------------------------


def verdicts(peers: Sequence[Peer], planned: Sequence[Planned], times: Times) -> Iterator[Verdict]:
    """At the peak of each of these peers the fastest of them that fits in there, and the plan for that budget."""
    for peer in peers:
        fitting = [other for other in peers if other.peak_bytes <= peer.peak_bytes]
        rival = min(fitting, key=lambda other: other.seconds.value)
        ours = [item for item in planned if item.label == peer.name]
        if not ours:
            yield Verdict(peer.name, peer.peak_bytes, rival.name, "", None, NO_PLAN, None)
            continue
        step = min(ours, key=lambda item: (not item.holds, item.seconds.value))
        ratio = ratio_of((step.step, 1), (rival.name, 1), times)
        yield Verdict(peer.name, peer.peak_bytes, rival.name, step.system, ratio, in_words(ratio), step.holds)


def ratio_of(ours: Key, theirs: Key, times: Times) -> Estimate:
    """Of two times in the same rounds: one, and the median of the paired differences as a part of theirs."""
    return estimate(lambda view: 1 + view.over(ours, theirs) / view.level(theirs), times, SINGLE)


def in_words(ratio: Estimate) -> str:
    """Say what the interval says."""
    return FASTER if ratio.high < 1 else SLOWER if ratio.low > 1 else SAME

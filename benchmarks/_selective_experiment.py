"""Memory against speed of every mode on a whole model, after the comparison that torchtune published.

The model is the byte-level GPT of `examples/byte_gpt.py`, without dropout, so that torch_remat, which restores no random
state, is right as well. A step is a forward and a backward pass; gradients stay allocated. The peak is of the bytes that
torch allocated during the step, over those before it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec

import torch
from _subjects import GPT, ModelSettings
from _timing import (
    SINGLE,
    Estimate,
    Key,
    Settings as BlockSettings,
    Timer,
    Times,
    Track,
    estimate,
    finished,
    quiet,
    single_calls,
)
from _training import (
    FULL,
    SAVED_OPS,
    SECOND,
    THIRD,
    Forward,
    Way,
    allocated_bytes,
    left_by,
    torch_ways,
    wrapped,
)
from _ways import OURS, REMAT, remat, unequal
from torch import Tensor, nn

import reactivate
from reactivate import policies

EXPERIMENT = "experiment"
EVERY = {FULL: 1, SECOND: 2, THIRD: 3}
SAVED_MODULES = "linear modules saved"

OUR_POLICIES = {
    FULL: policies.full(),
    SECOND: policies.recompute_every(2),
    THIRD: policies.recompute_every(3),
    SAVED_OPS: policies.first_match(policies.compute_intensive(), policies.full()),
    SAVED_MODULES: policies.first_match(policies.save_modules(nn.Linear), policies.full()),
}


@dataclass(frozen=True)
class Settings:
    """Settings: how long to measure, and what.

    Attributes:
        block: of the small block.
        large_width, large_length, large_calls: of the large block: features, tokens, rounds of single calls.
        layers, dim, heads, context: of the experiment's model.
        batch: of the experiment, where each way has the same; the budget is the plain step's peak at half of it.
        experiment_calls: rounds of the experiment.
        clock: "cpu" or "wall"; on an accelerator, the large block and the experiment have "wall" always.
    """

    block: BlockSettings = field(default_factory=lambda: BlockSettings(batch_seconds=0.03))
    large_width: int = 1024
    large_length: int = 512
    large_calls: int = 30
    layers: int = 12
    dim: int = 192
    heads: int = 6
    context: int = 128
    batch: int = 8
    experiment_calls: int = 15
    clock: str = "cpu"


@dataclass(frozen=True)
class Point:
    """A step of the model by one way.

    Attributes:
        mode: what is recomputed.
        peak_bytes: allocated at the step's peak, over what was allocated before it.
        seconds: of the step: the median over the rounds.
        tokens_per_second: of the same rounds.
    """

    system: str
    mode: str
    batch: int
    peak_bytes: int
    seconds: Estimate
    tokens_per_second: Estimate


@dataclass(frozen=True)
class Experiment:
    """Every mode of every system on one model.

    Attributes:
        parameters: how many the model has.
        budget_bytes: what the peaks of `at_equal_memory` stay below, with the largest batches that do.
        differences: {way: what its step leaves different from plain, bit for bit}.
    """

    parameters: int
    budget_bytes: int
    at_equal_batch: list[Point]
    at_equal_memory: list[Point]
    differences: dict[str, list[str]]


def make_model_ways() -> list[Way]:
    """Every mode of every system that has it. Without torch_remat where that is not installed."""
    ways = torch_ways(_blocks, EVERY)
    if find_spec("torch_remat"):
        ways += [Way(REMAT, FULL, partial(wrapped, _blocks, 1, remat))]
    return ways + [Way(OURS, mode, partial(_applied, policy)) for mode, policy in OUR_POLICIES.items()]


def _blocks(model: GPT) -> nn.ModuleList:
    return model.blocks


def _applied(policy: policies.Policy, model: GPT) -> GPT:
    reactivate.apply(model, policy)
    return model


def measure_experiment(settings: Settings, device: torch.device, track: Track) -> Experiment:
    """All ways at one batch, then each at the largest batch whose peak stays below the budget."""
    ways = make_model_ways()
    models = {way.name: make_model(way, settings, device) for way in ways}
    timer = Timer(device, settings.clock if device.type == "cpu" else "wall")

    def points(batches: dict[str, int], title: str) -> list[Point]:
        steps = {
            (name, batch): finished(step_of(forward_of(models[name], batch, settings, device)), device)
            for name, batch in batches.items()
        }
        times = single_calls(steps, settings.experiment_calls, timer, track(title, settings.experiment_calls))
        return [
            _point(
                way,
                batches[way.name],
                peak_bytes(models[way.name], batches[way.name], settings, device),
                times,
                settings,
            )
            for way in ways
        ]

    with quiet():
        differences = {way.name: _differences(models, way.name, settings, device) for way in ways}
        same = points({way.name: settings.batch for way in ways}, f"{EXPERIMENT}, one batch")
        budget = peak_bytes(models[ways[0].name], max(1, settings.batch // 2), settings, device)
        tick = track(f"{EXPERIMENT}, batches", len(ways))
        largest = {}
        for way, point in zip(ways, same, strict=True):
            largest[way.name] = largest_batch(models[way.name], budget, point, settings, device)
            tick()
        fitting = points(largest, f"{EXPERIMENT}, equal memory")
    parameters = sum(parameter.numel() for parameter in next(iter(models.values())).parameters())
    return Experiment(parameters, budget, same, fitting, differences)


def make_model(way: Way, settings: Settings, device: torch.device) -> GPT:
    """The model as `way` has it, with gradients allocated."""
    torch.manual_seed(0)
    sizes = ModelSettings(
        layers=settings.layers, dim=settings.dim, heads=settings.heads, context=settings.context, dropout=0.0
    )
    model = GPT(sizes).to(device)
    way.make(model)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return model


def forward_of(model: GPT, batch: int, settings: Settings, device: torch.device) -> Forward:
    """The loss on bytes that are the same for every way."""
    generator = torch.Generator().manual_seed(batch)
    tokens = torch.randint(256, (batch, settings.context + 1), generator=generator).to(device)

    def forward() -> Tensor:
        logits = model(tokens[:, :-1])
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    return forward


def step_of(forward: Forward) -> Callable[[], Tensor]:
    """The forward pass and a backward pass, to the loss."""

    def step() -> Tensor:
        loss = forward()
        loss.backward()
        return loss.detach()

    return step


def peak_bytes(model: GPT, batch: int, settings: Settings, device: torch.device) -> int:
    """The most that is allocated during a step, over what was allocated before it."""
    _, peak = allocated_bytes(forward_of(model, batch, settings, device), device)
    return peak


def largest_batch(model: GPT, budget_bytes: int, known: Point, settings: Settings, device: torch.device) -> int:
    """The largest batch whose peak is not above the budget, at least 1.

    The peak grows nearly linearly with the batch: a line through zero says where to begin, and the rest is counting.
    """

    def fits(batch: int) -> bool:
        return peak_bytes(model, batch, settings, device) <= budget_bytes

    batch = max(1, round(budget_bytes / known.peak_bytes * known.batch))
    if fits(batch):
        while fits(batch + 1):
            batch += 1
        return batch
    while batch > 1 and not fits(batch - 1):
        batch -= 1
    return max(1, batch - 1)


def _point(way: Way, batch: int, peak: int, times: Times, settings: Settings) -> Point:
    key: Key = (way.name, batch)
    tokens = batch * settings.context
    seconds = estimate(lambda view: view.level(key), times, SINGLE)
    speed = estimate(lambda view: tokens / view.level(key), times, SINGLE)
    return Point(way.system, way.mode, batch, peak, seconds, speed)


def _differences(models: dict[str, GPT], name: str, settings: Settings, device: torch.device) -> list[str]:
    plain, other = (
        left_by(models[key], step_of(forward_of(models[key], settings.batch, settings, device)))
        for key in (next(iter(models)), name)
    )
    return unequal(plain, other)

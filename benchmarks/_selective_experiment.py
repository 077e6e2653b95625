"""The third part: memory against speed on a whole model, after the comparison that torchtune published.

The model is the byte-level GPT of `examples/byte_gpt.py`, without dropout, so that torch_remat, which restores no random
state, is right as well. A step is a forward and a backward pass; gradients stay allocated. The peak is of the bytes that
torch allocated during the step, over those before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from _figures import SINGLE, Key, Times, estimate
from _measure import Timer, quiet, single_calls
from _results import Track
from _selective_block import finished
from _selective_examples import GPT, ModelSettings
from _selective_memory import Forward, allocated_bytes
from _selective_results import EXPERIMENT, Experiment, Point, Settings
from _selective_ways import SAC
from _subjects import OURS, PLAIN, REMAT, TORCH
from torch import Tensor, nn
from torch.utils import checkpoint as upstream

import reactivate
from reactivate import policies

NONE, FULL, SECOND, THIRD = "none", "full", "every 2nd block", "every 3rd block"
OPS, MODULES = "op list saved", "linear modules saved"
EVERY = {FULL: 1, SECOND: 2, THIRD: 3}

aten = torch.ops.aten
# What `policies.compute_intensive()` is on this model to SAC, which sees the ops below autograd.
OP_LIST = [
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
]

OUR_POLICIES = {
    FULL: policies.full(),
    SECOND: policies.recompute_every(2),
    THIRD: policies.recompute_every(3),
    OPS: policies.first_match(policies.compute_intensive(), policies.full()),
    MODULES: policies.first_match(policies.save_modules(nn.Linear), policies.full()),
}


@dataclass(frozen=True)
class ModelWay:
    """A way to checkpoint the model, by changing it in place."""

    system: str
    mode: str
    change: Callable[[GPT], object]

    @property
    def name(self) -> str:
        return f"{self.system}: {self.mode}"


def make_model_ways() -> list[ModelWay]:
    """Every mode of every system that has it. Without torch_remat where that is not installed."""
    contexts = partial(upstream.create_selective_checkpoint_contexts, OP_LIST)
    ways = [ModelWay(PLAIN, NONE, lambda model: None)]
    ways += [ModelWay(TORCH, mode, partial(_every, k, lambda fn: _non_reentrant(fn))) for mode, k in EVERY.items()]
    ways += [ModelWay(SAC, OPS, partial(_every, 1, lambda fn: _non_reentrant(fn, context_fn=contexts)))]
    if find_spec("torch_remat"):
        ways += [ModelWay(REMAT, FULL, partial(_every, 1, _remat))]
    return ways + [ModelWay(OURS, mode, partial(_apply, policy)) for mode, policy in OUR_POLICIES.items()]


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


def make_model(way: ModelWay, settings: Settings, device: torch.device) -> GPT:
    """The model as `way` has it, with gradients allocated."""
    torch.manual_seed(0)
    sizes = ModelSettings(
        layers=settings.layers, dim=settings.dim, heads=settings.heads, context=settings.context, dropout=0.0
    )
    model = GPT(sizes).to(device)
    way.change(model)
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


def _point(way: ModelWay, batch: int, peak: int, times: Times, settings: Settings) -> Point:
    key: Key = (way.name, batch)
    tokens = batch * settings.context
    seconds = estimate(lambda view: view.level(key), times, SINGLE)
    speed = estimate(lambda view: tokens / view.level(key), times, SINGLE)
    return Point(way.system, way.mode, batch, peak, seconds, speed)


def _differences(models: dict[str, GPT], name: str, settings: Settings, device: torch.device) -> list[str]:
    plain, other = (_one_step(models[key], settings, device) for key in (next(iter(models)), name))
    return [what for what in plain if not all(map(torch.equal, plain[what], other[what]))]


def _one_step(model: GPT, settings: Settings, device: torch.device) -> dict[str, list[Tensor]]:
    torch.manual_seed(0)
    model.zero_grad(set_to_none=False)
    loss = step_of(forward_of(model, settings.batch, settings, device))()
    gradients: Iterator[Any] = (parameter.grad for parameter in model.parameters())
    return {
        "loss": [loss],
        "gradients": [gradient.clone() for gradient in gradients],
        "random numbers": [torch.rand(4, device=device)],
    }


def _apply(policy: policies.Policy, model: GPT) -> None:
    reactivate.apply(model, policy)


def _every(k: int, wrap: Callable[[Callable[..., Tensor]], Callable[..., Tensor]], model: GPT) -> None:
    """Every k-th block, from the first: those that `policies.recompute_every(k)` takes."""
    for block in model.blocks[::k]:
        block.forward = wrap(block.forward)


def _non_reentrant(fn: Callable[..., Tensor], **options: Any) -> Callable[..., Tensor]:
    return partial(upstream.checkpoint, fn, use_reentrant=False, **options)


def _remat(fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
    import torch_remat  # an optional package

    checkpointed: Callable[..., Tensor] = torch_remat.checkpoint(region_name="block")(fn)
    return checkpointed

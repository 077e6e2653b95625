"""Steps that can be measured: each on a copy of the model, with its peak and what it leaves."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter

import torch
from _figures import Key
from _frontier_models import Subject
from _frontier_peers import Call
from _frontier_results import Settings
from _measure import Step
from torch import Tensor, nn

from reactivate.planner.profile.costs import measured_peak, seconds_of


@dataclass(frozen=True)
class Ready:
    """A step after its first run.

    Attributes:
        key: of its times.
        model: the copy that it runs.
        first_seconds: on the wall, of the first run.
        peak_bytes: above what is there before the step.
        differences: what it leaves different from the plain step, bit for bit.
    """

    key: Key
    model: nn.Module
    step: Callable[[], Tensor]
    first_seconds: float
    peak_bytes: int
    differences: list[str]


def ready(
    name: str,
    subject: Subject,
    make: Callable[[nn.Module], Call],
    device: torch.device,
    first: Callable[[Step], object] = lambda step: step(),
) -> Ready:
    """A step on a copy of the subject's model.

    Args:
        name: of the step.
        subject: what is trained.
        make: from the copy to what is called in its place.
        device: where it is.
        first: runs the step for the first time.
    """
    model = subject.copied()
    step = subject.step_of(make(model))
    began = perf_counter()
    first(step)
    first_seconds = perf_counter() - began
    gc.collect()
    peak_bytes = measured_peak(step, device)
    return Ready((name, 1), model, step, first_seconds, peak_bytes, _differences(subject, model, step))


def rounds_in(steps: Sequence[Ready], settings: Settings, device: torch.device) -> int:
    """Return how many rounds of all steps the settings' seconds have room for."""
    once = sum(seconds_of(item.step, device) for item in steps)
    return max(settings.fewest, min(settings.most, round(settings.seconds / once)))


def _differences(subject: Subject, model: nn.Module, step: Callable[[], Tensor]) -> list[str]:
    plain = subject.copied()
    expected, found = _left_by(plain, subject.step_of(plain), plain), _left_by(model, step, subject.copied())
    return [what for what in expected if not all(map(torch.equal, expected[what], found[what]))]


def _left_by(model: nn.Module, step: Callable[[], Tensor], fresh: nn.Module) -> dict[str, list[Tensor]]:
    """Return what one step leaves, from the buffers of a fresh copy and gradients of zero on."""
    torch.manual_seed(0)
    with torch.no_grad():
        for buffer, first in zip(model.buffers(), fresh.buffers(), strict=True):
            buffer.copy_(first)
    model.zero_grad(set_to_none=False)
    loss = step()
    return {
        "loss": [loss],
        "gradients": [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None],
        "buffers": [buffer.clone() for buffer in model.buffers()],
        "random numbers": [torch.rand(4, device=loss.device)],
    }

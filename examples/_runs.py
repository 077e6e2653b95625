"""The record of a training run: losses, times, the memory of a step, and every bit that must be as in the other run."""

from __future__ import annotations

import json
import random
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from reactivate import Plan


@dataclass
class Timeline:
    """Bytes allocated during one training step, over those that were allocated before it."""

    seconds: list[float]
    allocated_bytes: list[int]
    forward_seconds: float

    @property
    def peak_bytes(self) -> int:
        return max(self.allocated_bytes)

    @property
    def kept_bytes(self) -> int:
        """Return what the forward pass leaves to the backward pass."""
        moments = zip(self.seconds, self.allocated_bytes)
        return [allocated for second, allocated in moments if second <= self.forward_seconds][-1]


@dataclass
class Run:
    """A training run. Its last loss is that of the step whose memory was watched; `evidence` has the bits of everything."""

    losses: list[float]
    step_seconds: list[float]
    timeline: Timeline
    evidence: dict[str, bytes]
    plan: Plan | None = None

    def figures(self) -> dict[str, float]:
        return {
            "peak_activation_bytes": self.timeline.peak_bytes,
            "kept_after_forward_bytes": self.timeline.kept_bytes,
            "median_step_seconds": statistics.median(self.step_seconds),
        }


def watched(step: Callable[[], object]) -> Timeline:
    """The memory of a step, from the allocations and releases in the profiler's trace."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "trace.json")
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    forward = next(event for event in events if event["name"] == "forward")
    changes = sorted((event for event in events if event["name"] == "[memory]"), key=lambda event: event["ts"])
    timeline = Timeline([0.0], [0], forward["dur"] / 1e6)
    for change in changes:
        timeline.seconds.append((change["ts"] - forward["ts"]) / 1e6)
        timeline.allocated_bytes.append(timeline.allocated_bytes[-1] + change["args"]["Bytes"])
    return timeline


def evidence_of(losses: list[Tensor], model: nn.Module) -> dict[str, bytes]:
    """Every bit that training left behind, by name."""
    tensors = {f"the loss of step {step}": loss for step, loss in enumerate(losses, start=1)}
    for name, parameter in model.named_parameters():
        tensors |= {f"the last gradient of {name}": parameter.grad, f"the parameter {name}": parameter}
    tensors["the state of torch's random numbers"] = torch.get_rng_state()
    evidence = {name: tensor.detach().numpy().tobytes() for name, tensor in tensors.items()}
    evidence["the state of Python's random numbers"] = repr(random.getstate()).encode()
    return evidence


def first_difference(plain: Run, planned: Run) -> str | None:
    """The name of the first thing that is not the same in both, bit for bit; None if everything is."""
    return next((name for name, bits in plain.evidence.items() if bits != planned.evidence[name]), None)

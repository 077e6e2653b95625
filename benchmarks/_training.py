"""A model in training, its memory, and the ways that torch has to checkpoint it."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from _ways import PLAIN, SAC, TORCH, non_reentrant, repeatable, selective
from torch import Tensor, nn
from torch.profiler import record_function

sys.path.append(str(Path(__file__).parents[1] / "examples"))

from _runs import watched

NONE, FULL, SECOND, THIRD, FOURTH = "none", "full", "every 2nd block", "every 3rd block", "every 4th block"
EVERY = {FULL: 1, SECOND: 2, THIRD: 3, FOURTH: 4}
"""{mode: of so many blocks in a row the first is checkpointed}."""

SAVED_OPS = "op list saved"
aten = torch.ops.aten
# What `policies.compute_intensive()` is on these models to SAC, which sees the ops below autograd.
ATTENTION = ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention")
OP_LIST = [aten.mm.default, aten.addmm.default, aten.bmm.default, aten.convolution.default]
OP_LIST += [getattr(aten, f"_scaled_dot_product_{kind}").default for kind in ATTENTION]

Call = Callable[..., Any]
Forward = Callable[[], Tensor]
"""A forward pass, to a tensor from which a backward pass begins."""

Blocks = Callable[[Any], Iterable[nn.Module]]
"""model -> its blocks."""


# -- ways -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Way:
    """A way to run a step.

    Attributes:
        make: from a copy of the model, which it may change, to what is called in its place.
        first: runs the first step, in which what has to be compiled is compiled.
        is_compiled: whether it is.
    """

    system: str
    mode: str
    make: Callable[[Any], Call]
    first: Callable[[Callable[[], object]], object] = lambda step: step()
    is_compiled: bool = False

    @property
    def name(self) -> str:
        return f"{self.system}: {self.mode}"


def torch_ways(blocks_of: Blocks, every: Mapping[str, int]) -> list[Way]:
    """The plain step, torch's checkpoint of every k-th block, and its selective checkpoint of each block."""
    return [
        Way(PLAIN, NONE, lambda model: model),
        *(Way(TORCH, mode, partial(wrapped, blocks_of, k, non_reentrant)) for mode, k in every.items()),
        Way(SAC, SAVED_OPS, partial(wrapped, blocks_of, 1, partial(selective, OP_LIST))),
    ]


def wrapped(blocks_of: Blocks, k: int, wrap: Callable[[Call], Call], model: nn.Module) -> nn.Module:
    """Every k-th block, from the first, in place: those that `policies.recompute_every(k)` takes."""
    for block in [*blocks_of(model)][::k]:
        block.forward = wrap(block.forward)  # type: ignore[method-assign]
    return model


def left_by(model: nn.Module, step: Callable[[], Tensor]) -> dict[str, list[Tensor]]:
    """Return what one step leaves, from gradients of zero on."""
    torch.manual_seed(0)
    model.zero_grad(set_to_none=False)
    with repeatable(next(model.parameters()).device):
        loss = step()
    return {
        "loss": [loss],
        "gradients": [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None],
        "buffers": [buffer.clone() for buffer in model.buffers()],
        "random numbers": [torch.rand(4, device=loss.device)],
    }


# -- memory -----------------------------------------------------------------------------------------------------------


def allocated_bytes(forward: Forward, device: torch.device) -> tuple[int, int]:
    """Return what torch has allocated after the forward pass, and at the peak of the step, over what there was before it.

    Whatever holds it: also the result of the forward pass, and states of random number generators.
    """
    forward().sum().backward()  # what is made once is made now
    if device.type == "cpu":
        timeline = watched(partial(_step, forward))
        return timeline.kept_bytes, timeline.peak_bytes
    torch.accelerator.synchronize(device)
    torch.accelerator.reset_peak_memory_stats(device)
    before = torch.accelerator.memory_allocated(device)
    output = forward()
    after = torch.accelerator.memory_allocated(device)
    output.sum().backward()
    torch.accelerator.synchronize(device)
    return after - before, torch.accelerator.max_memory_allocated(device) - before


def _step(forward: Forward) -> None:
    with record_function("forward"):
        output = forward()
    output.sum().backward()


# -- a model ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Size:
    """The size of a model and its batch.

    Attributes:
        layers: blocks.
        dim: their width; of a ResNet the channels of its first stage.
        batch: sequences, or images.
        length: tokens of a sequence, or pixels of a side.
    """

    layers: int
    dim: int
    batch: int
    length: int


@dataclass(frozen=True)
class Subject:
    """A model in training.

    Attributes:
        title: what it is, for a reader.
        args, kwargs: of its call.
        loss: from what it returns to a scalar.
        blocks: the paths of what others checkpoint.
    """

    name: str
    title: str
    model: nn.Module
    args: tuple[Tensor, ...]
    kwargs: dict[str, Tensor]
    loss: Callable[[Any], Tensor]
    blocks: tuple[str, ...]

    def copied(self) -> nn.Module:
        """The model again: modules and buffers of its own, the same parameters and gradients."""
        shared = {id(parameter): parameter for parameter in self.model.parameters()}
        return copy.deepcopy(self.model, shared)  # type: ignore[arg-type]

    def blocks_of(self, model: nn.Module) -> list[nn.Module]:
        """The blocks of a copy."""
        return [model.get_submodule(path) for path in self.blocks]

    def step_of(self, model: Callable[..., Any]) -> Callable[[], Tensor]:
        """A forward and a backward pass of a copy; what it returns stays alive in between, as in most training loops."""

        def step() -> Tensor:
            output = model(*self.args, **self.kwargs)
            loss = self.loss(output)
            loss.backward()
            return loss.detach()

        return step

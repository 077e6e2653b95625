"""The peers of plans: no checkpointing, torch's by block, and torch's selective checkpointing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from _frontier_models import Subject
from _selective_experiment import FULL, NONE, OP_LIST, SECOND, THIRD
from _selective_ways import SAC
from _subjects import PLAIN, TORCH
from torch import nn
from torch.utils import checkpoint as upstream

FOURTH = "every 4th block"
SAVED_OPS = "op list saved"
EVERY = {FULL: 1, SECOND: 2, THIRD: 3, FOURTH: 4}

Call = Callable[..., Any]


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
    make: Callable[[nn.Module], Call]
    first: Callable[[Callable[[], object]], object] = lambda step: step()
    is_compiled: bool = False

    @property
    def name(self) -> str:
        return f"{self.system}: {self.mode}"


def eager_peers(subject: Subject) -> list[Way]:
    """The plain step first."""
    contexts = partial(upstream.create_selective_checkpoint_contexts, [*OP_LIST, torch.ops.aten.convolution.default])

    def every(k: int, wrap: Callable[[Call], Call], model: nn.Module) -> Call:
        for block in subject.blocks_of(model)[::k]:
            block.forward = wrap(block.forward)  # type: ignore[method-assign]
        return model

    return [
        Way(PLAIN, NONE, lambda model: model),
        *(Way(TORCH, mode, partial(every, k, _non_reentrant)) for mode, k in EVERY.items()),
        Way(SAC, SAVED_OPS, partial(every, 1, partial(_non_reentrant, context_fn=contexts))),
    ]


def _non_reentrant(fn: Call, **options: Any) -> Call:
    return partial(upstream.checkpoint, fn, use_reentrant=False, **options)

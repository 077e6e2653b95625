"""CUDA and ROCm: Philox generators, whose state is a seed and an offset."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from reactivate._backends.base import Backend
from reactivate.errors import UnsupportedError


class CudaBackend(Backend):
    """The device type "cuda"."""

    def read_rng(self) -> Sequence[Any]:
        if torch.cuda.is_current_stream_capturing():
            raise UnsupportedError(
                "A checkpointed region was called while a CUDA graph is captured: the generator's state cannot be read "
                "then. Capture without checkpointing, or, if the function draws no random number, checkpoint it with "
                "guards=guards.DEFAULT.without('rng')."
            )
        return [(generator.initial_seed(), generator.get_offset()) for generator in torch.cuda.default_generators]

    def write_rng(self, states: Sequence[Any]) -> None:
        for generator, (seed, offset) in zip(torch.cuda.default_generators, states):
            generator.manual_seed(seed)
            generator.set_offset(offset)

    def is_same_rng(self, first: Sequence[Any], second: Sequence[Any]) -> bool:
        return first == second

    def first_rng(self) -> Sequence[Any] | None:
        return [(generator.initial_seed(), 0) for generator in torch.cuda.default_generators]

"""torch_tpu: a TPU as a device of torch's own, through what its device module lets others call.

Most functions of `torch.tpu` (`device_count`, `current_device`, `current_stream`, `device`, and since torch 2.13
`get_rng_state`) raise unless torch itself calls them, and name `torch.accelerator` for everybody else. Its generators are
`torch.tpu.default_generators`, one for each device of the process.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from reactivate._backends.base import Backend


class TpuBackend(Backend):
    """The device type "tpu"."""

    offloads_in_graphs = True

    def is_initialized(self) -> bool:
        return bool(self._module.is_initialized())

    def read_rng(self) -> Sequence[Any]:
        return [generator.get_state() for generator in self._module.default_generators]

    def write_rng(self, states: Sequence[Any]) -> None:
        for generator, state in zip(self._module.default_generators, states):
            generator.set_state(state)

    def seed_rng(self, seed: int) -> None:
        for generator in self._module.default_generators:
            generator.manual_seed(seed)

    def read_place(self) -> tuple[Any, Any]:
        # A process has the tensors of one device, and its streams order nothing: the compiler goes by the data.
        return torch.accelerator.current_device_index(), None

    def at_place(self, place: tuple[Any, Any]) -> AbstractContextManager[Any]:
        return torch.accelerator.device_index(place[0])

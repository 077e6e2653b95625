"""XLA: one seed as the state of a device's random numbers, and a barrier that its compiler does not see through.

Imported only where torch_xla is.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from reactivate._backends.base import Backend
from reactivate._torch.rng import register_device_module
from reactivate._xla import seeds
from reactivate._xla.seeds import RUNTIME, Seed, Seeds
from reactivate.errors import UnsupportedError

_OF_XLA = Tensor, Parameter
_MOST = 2**64 - 1
_FIRST_SEED = 101  # of every device, whatever `torch.manual_seed` said before torch_xla was there


class Barrier:
    """The fence of XLA."""

    def __call__(self, tensors: list[Tensor]) -> list[Tensor]:
        """Aliases behind one optimisation barrier.

        Source: OptimizationBarrier in XLA's operation semantics. It works in place, on what a tensor stands for: so not on
        the caller's tensors, which would all become outputs of the graph, but on clones, which on XLA are handles.
        """
        aliases = [_plain(tensor).detach().clone() for tensor in tensors]
        RUNTIME._xla_optimization_barrier_(aliases)
        return aliases

    def run(self, tensors: list[Tensor]) -> None:
        """Run the ops that are recorded for these tensors.

        This is not a step, in which XLA may write results into the memory of inputs: other tensors still need these.
        """
        plain = list(map(_plain, tensors))
        if any(map(RUNTIME._is_placecholder, plain)):  # an op still runs, or a scan is traced
            RUNTIME._xla_wait_device_ops(_devices())
        if not RUNTIME._get_allow_execution() or any(map(RUNTIME._is_placecholder, plain)):
            raise UnsupportedError(
                'check="every" cannot be used in torch_xla.compile(full_graph=True) or around torch_xla\'s scan: '
                "it runs op by op, and these record ops that must not run. Leave check out."
            )
        RUNTIME._xla_sync_multi(plain, [], wait=False, sync_xla_data=False)


barrier = Barrier()


def _plain(tensor: Tensor) -> Tensor:
    """A tensor that is sharded over devices is a wrapper of one that XLA knows."""
    return tensor if type(tensor) in _OF_XLA else getattr(tensor, "global_tensor", tensor)


class DeviceModule(ModuleType):
    """A stand-in for `torch.xla`: the functions that torch's own code asks of the module of a device type."""

    def device_count(self) -> int:
        """Count the devices of this process."""
        return len(_devices())

    def is_available(self) -> bool:
        """Return whether there is a device."""
        return self.is_initialized() and bool(_devices())

    def is_initialized(self) -> bool:
        """Return whether the runtime has begun to use devices: asking for them would make it begin."""
        return bool(RUNTIME._xla_runtime_is_initialized())

    _initialized = property(is_initialized)  # torch's own checkpointing looks here whether there are random numbers

    def current_device(self) -> int:
        """The number of the device that "xla" without a number is."""
        return torch.device(RUNTIME._xla_get_default_device()).index or 0

    @contextmanager
    def device(self, index: Any) -> Iterator[None]:
        """A context with this device as the current one."""
        number = torch.device(index).index if isinstance(index, (str, torch.device)) else index
        before = RUNTIME._xla_get_default_device()
        if number is not None and number >= 0:
            RUNTIME._xla_set_default_device(f"xla:{number}")
        try:
            yield
        finally:
            RUNTIME._xla_set_default_device(before)

    def get_rng_state(self, device: Any = None) -> Seed:
        """The seed of a device, any whole number of 64 bits without a sign, which knows its root."""
        return seeds.read_whole_seed(_name_of(device))

    def set_rng_state(self, state: int, device: Any = None) -> None:
        """Set what `get_rng_state` gave; anything else is a `ValueError`."""
        if not 0 <= int(state) <= _MOST:
            raise ValueError(f"A seed of XLA is a whole number from 0 to {_MOST}; got {state}.")
        seeds.write_seed(_name_of(device), state)


class XlaBackend(Backend):
    """The device type "xla"."""

    def seed_rng(self, seed: int) -> None:
        self.write_rng(self.read_rng()._replace(seeds=(seed,) * len(_names())))

    def read_rng(self) -> Seeds:
        return Seeds.of(map(seeds.read_seed, _names()))

    def write_rng(self, states: Seeds, write: Callable[[str, int], None] = seeds.write_seed) -> None:
        RUNTIME._set_use_eager_mode(states.is_eager)
        for name, seed in zip(_names(), states.seeds):
            write(name, seed)

    def rewind_rng(self, states: Seeds) -> None:
        # Where ops run one by one, each draw moves the root on as well.
        self.write_rng(states, seeds.write_seed if states.is_eager else seeds.rewind_seed)

    def exchange_rng(self, states: Seeds) -> Seeds:
        now = Seeds.of(map(seeds.take_seed, _names()))
        self.write_rng(states)
        return now

    def give_back_rng(self, held: Any, backward: int) -> bool:
        if held.is_eager:  # each draw moves the root on as well
            self.write_rng(held)
            return False
        RUNTIME._set_use_eager_mode(False)
        lent = [seeds.lend_root(name, seed, backward) for name, seed in zip(_names(), held.seeds)]
        return any(lent)

    def settle_rng(self, backward: int) -> None:
        for name in _names():
            seeds.settle_root(name, backward)

    def count_unseeded(self) -> int:
        """Count the calls of `torch.randperm` that XLA computes: torch_xla gives those of dtypes but int64 to the CPU."""
        count = RUNTIME._xla_counter_value
        return (count("xla::randperm") or 0) - (count("aten::randperm") or 0)

    def refuse_unseeded(self, before: int) -> None:
        if self.count_unseeded() > before:
            raise UnsupportedError(
                'A checkpointed region calls torch.randperm(n, device="xla"), which follows no seed on XLA: '
                "the recomputation has drawn another permutation. Draw it outside of the region, draw it on the CPU "
                '(torch.randperm(n).to(x.device)), or keep it with a policy: policy=policies.save_ops("randperm").'
            )

    def rng_of_forward(self, before: Seeds) -> Seeds:
        if before.is_eager:
            return before
        since = seeds.count_markers() - before.markers
        found = (seeds.seed_of_forward(name, seed, since) for name, seed in zip(_names(), before.seeds))
        return before._replace(seeds=tuple(found))

    @contextmanager
    def op_by_op(self) -> Iterator[None]:
        before = self.exchange_rng(self.read_rng()._replace(is_eager=True))
        try:
            yield
        finally:
            self.write_rng(before)

    def is_same_rng(self, first: Seeds, second: Seeds) -> bool:
        return first[:2] == second[:2]  # however many steps are marked

    def first_rng(self) -> Seeds:
        return self.read_rng()._replace(seeds=(_FIRST_SEED,) * MODULE.device_count())


def _devices() -> list[str]:
    return RUNTIME._xla_get_devices()  # type: ignore[no-any-return]


def _names() -> list[str]:
    """The names of the devices of this process."""
    count = len(_devices())
    return [_name_of(None)] if count == 1 else [f"xla:{index}" for index in range(count)]


def _name_of(device: Any) -> str:
    if device is None:
        return RUNTIME._xla_get_default_device()  # type: ignore[no-any-return]
    if isinstance(device, int):
        return f"xla:{device}"
    name = str(device)
    return name if ":" in name else f"{name}:0"


MODULE = DeviceModule("torch.xla", DeviceModule.__doc__)
BACKEND = XlaBackend("xla", MODULE)

if not hasattr(torch, "xla") and "torch.xla" not in sys.modules:
    register_device_module("xla", MODULE)  # torch's own checkpointing fails without one

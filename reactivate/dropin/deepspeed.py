"""`deepspeed.checkpointing` on this engine: its functions, signatures and defaults.

Unlike DeepSpeed's own: gradients are bitwise those of the plain model for leaf inputs, inputs that need no gradient and
inputs modified in place (or backward raises); sizes need not be divisible; partitioned inputs that are not the same on all
ranks are refused by name; `torch.autograd.grad` and `retain_graph` work with both variants.

- `partition_activations` keeps one part of each region's inputs on each rank of the model-parallel group (`storage.Sharded`).
  Without an `mpu_` that group has one rank, and nothing is partitioned, as in DeepSpeed.
- `checkpoint_in_cpu` keeps them in the memory of the host (`storage.Host`); with both, each rank keeps its part there.
- `synchronize` waits for the device at each boundary of a region, `profile` logs how long forwards and recomputations take,
  to the logger "reactivate.dropin.deepspeed".
- `contiguous_checkpointing` is refused. `num_checkpoints` and `set_num_layers` size its buffers, and do nothing without it.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from reactivate._backends import accelerator
from reactivate._types import DEVICE, Storage
from reactivate.dropin._calls import Chosen, Synchronized, call_region, with_tracker
from reactivate.dropin._deepspeed_settings import DeepSpeedOptions, configured
from reactivate.dropin._installation import Installation, Tally, again, library
from reactivate.errors import UsageError
from reactivate.guards.named_streams import RngTracker, tensor_parallel_seeds
from reactivate.storage import Host

__all__ = [
    "CheckpointFunction",
    "CudaRNGStatesTracker",
    "checkpoint",
    "configure",
    "get_cuda_rng_tracker",
    "install",
    "is_configured",
    "model_parallel_cuda_manual_seed",
    "model_parallel_reconfigure_tp_seed",
    "non_reentrant_checkpoint",
    "partition_activations_in_checkpoint",
    "reset",
    "set_num_layers",
]

_OF_THE_TRACKER = (
    "CudaRNGStatesTracker",
    "get_cuda_rng_tracker",
    "model_parallel_cuda_manual_seed",
    "model_parallel_reconfigure_tp_seed",
)
_STREAM = "model-parallel-rng"
_UPSTREAM = "deepspeed.runtime.activation_checkpointing.checkpointing"
_SYNCHRONIZED = Synchronized()
_TIMED = Synchronized(logging.getLogger("reactivate.dropin.deepspeed"))

settings = DeepSpeedOptions()
"""The settings of this instance. `install` has an instance of this module of its own."""

tally = Tally()


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`deepspeed.checkpointing.checkpoint` on this engine: the same arguments and meanings.

    Args:
        function: what to checkpoint; called with `args` and `kwargs`.

    Returns:
        What `function` returns; of a list or tuple of one item that item, and a tuple for a list, as DeepSpeed does.

    Raises:
        StorageError: an input is partitioned and not the same on all ranks; see `storage.Sharded`.
        ReactivateError: see `reactivate.checkpoint`.

    Examples:
        >>> import torch
        >>> from reactivate.dropin.deepspeed import checkpoint
        >>> x = torch.ones(2, requires_grad=True)
        >>> checkpoint(lambda x: x.sin().exp(), x).sum().backward()
    """
    tally.add()
    guards = with_tracker(_tracker())
    if settings.profile:
        guards = guards.adding(_TIMED)
    elif settings.synchronize_checkpoint_boundary:
        guards = guards.adding(_SYNCHRONIZED)
    storage = settings.storage()
    inputs: Storage = storage if storage is DEVICE else Chosen(storage, _is_checkpointed)
    result = call_region(function, args, kwargs, guards, inputs)
    if isinstance(result, (list, tuple)):
        return result[0] if len(result) == 1 else tuple(result)
    return result


def non_reentrant_checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """`deepspeed.checkpointing.non_reentrant_checkpoint` on this engine: the same as `checkpoint`."""
    return checkpoint(function, *args)


def configure(
    mpu_: Any,
    deepspeed_config: Any = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """`deepspeed.checkpointing.configure` on this engine: what is not given is as in the file, or off.

    Args:
        mpu_: has `get_model_parallel_group` or `get_tensor_model_parallel_group`; None keeps that of the last call.
        deepspeed_config: the path of a JSON file, or its contents, whose "activation_checkpointing" is read.
        partition_activations: shard the inputs of regions over the model-parallel group.
        contiguous_checkpointing: refused if True.
        num_checkpoints: without an effect, as in DeepSpeed without contiguous buffers.
        checkpoint_in_cpu: keep them in the memory of the host.
        synchronize: wait for the device where regions and recomputations begin and end.
        profile: log how long they take.

    Raises:
        UsageError: an unknown option in the file, or options that do not go together.
        UnsupportedError: `contiguous_checkpointing`.

    Examples:
        >>> from reactivate.dropin import deepspeed
        >>> deepspeed.configure(None, {"activation_checkpointing": {"cpu_checkpointing": True}})
        >>> deepspeed.is_configured()
        True
    """
    global settings
    settings = configured(
        settings,
        mpu_,
        deepspeed_config,
        partition_activations=partition_activations,
        contiguous_memory_optimization=contiguous_checkpointing,
        number_checkpoints=num_checkpoints,
        cpu_checkpointing=checkpoint_in_cpu,
        synchronize_checkpoint_boundary=synchronize,
        profile=profile,
    )


def is_configured() -> bool:
    """Return whether `configure` was called."""
    return settings.is_configured


def set_num_layers(nlayers: int) -> None:
    """Note a number of checkpoints: without an effect, as in DeepSpeed without contiguous buffers."""
    _change(number_checkpoints=nlayers)


def partition_activations_in_checkpoint(partition_activation: bool) -> None:
    """Switch `partition_activations`."""
    _change(partition_activations=partition_activation)


def reset() -> None:
    """Unlock the memory of the host that is not in use. There are no other buffers."""
    if settings.cpu_checkpointing:
        Host(least_bytes=0).clear()


class CheckpointFunction:
    """DeepSpeed's `CheckpointFunction`, for code that applies it directly."""

    @staticmethod
    def apply(run_function: Callable[..., Any], all_outputs: list[Any], *args: Any) -> Any:
        """`checkpoint(run_function, *args)`, whose outputs go into a list as well."""
        result = checkpoint(run_function, *args)
        all_outputs += result if isinstance(result, tuple) else [result]
        return result


CudaRNGStatesTracker = RngTracker
"""The class of the tracker: `add`, `fork`, `reset`, `get_states` and `set_states`, on the CPU and on devices."""


@functools.cache
def get_cuda_rng_tracker() -> RngTracker:
    """Return the tracker of `model_parallel_cuda_manual_seed`. Regions restore its streams."""
    return RngTracker()


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Seed the accelerator, or the CPU if there is none, and start the stream that differs on each tensor-parallel rank.

    Args:
        seed: of the accelerator's own generators. That of the stream "model-parallel-rng" is `seed + 2718 + rank`, with the
            rank in the group of the `mpu_` that `configure` was given; 0 without one.

    Examples:
        >>> import torch
        >>> from reactivate.dropin import deepspeed
        >>> deepspeed.model_parallel_cuda_manual_seed(1234)
        >>> def block(x):
        ...     with deepspeed.get_cuda_rng_tracker().fork():
        ...         return torch.nn.functional.dropout(x) * x
        >>> deepspeed.checkpoint(block, torch.ones(4, requires_grad=True)).sum().backward()
    """
    tracker = get_cuda_rng_tracker()
    tracker.reset()
    device = accelerator()
    if device is None:
        torch.manual_seed(seed)
    else:
        device.seed_rng(seed)
    tracker.add(_STREAM, tensor_parallel_seeds(seed, _rank())[_STREAM])


def model_parallel_reconfigure_tp_seed(seed: int) -> None:
    """Start the stream of `model_parallel_cuda_manual_seed` again, from another seed.

    Raises:
        UsageError: there is no such stream yet.
    """
    tracker, begun = get_cuda_rng_tracker(), RngTracker()
    states = tracker.get_states()
    if _STREAM not in states:
        raise UsageError(
            f"model_parallel_reconfigure_tp_seed({seed}): there is no stream {_STREAM!r}. Call "
            "model_parallel_cuda_manual_seed(seed) first."
        )
    begun.add(_STREAM, tensor_parallel_seeds(seed, _rank())[_STREAM])
    tracker.set_states(states | begun.get_states())


def _rank() -> int:
    return 0 if settings.group is None else torch.distributed.get_rank(settings.group)


def install() -> Installation:
    """Run everything that calls DeepSpeed's activation checkpointing on this engine, without an edit.

    What DeepSpeed was configured with is taken over. Its RNG tracker and its functions of that stay DeepSpeed's.

    Returns:
        A handle with `remove()`; also a context manager. If it is installed already, the same handle.

    Raises:
        UsageError: DeepSpeed is not installed.
        UnsupportedError: DeepSpeed is configured with contiguous buffers.
    """
    upstream: Any = library(_UPSTREAM, "dropin.deepspeed.install()")
    present = again(upstream.__name__)
    if present is not None:
        return present
    found = DeepSpeedOptions(
        upstream.PARTITION_ACTIVATIONS,
        upstream.CONTIGUOUS_CHECKPOINTING,
        upstream.CPU_CHECKPOINT,
        upstream.num_layers,
        upstream.SYNCHRONIZE,
        upstream.PROFILE_TIME,
        upstream.mp_group,
        upstream.is_configured(),
    )
    names = {name: name for name in __all__ if name != "install" and name not in _OF_THE_TRACKER}
    return Installation(upstream, sys.modules["reactivate.dropin.deepspeed"], names, settings=found.checked())


def _change(**fields: Any) -> None:
    global settings
    settings = replace(settings, **fields)


def _is_checkpointed(tensor: Tensor) -> bool:
    return not getattr(tensor, "no_checkpointing", False)  # DeepSpeed's mark on a tensor that is to stay


def _tracker() -> Any:
    upstream = sys.modules.get(_UPSTREAM)
    return None if upstream is None else upstream.get_cuda_rng_tracker()

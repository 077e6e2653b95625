"""`megatron.core.tensor_parallel.checkpoint` on this engine, and Megatron's recompute options as policies.

Unlike Megatron's own function: the input that is distributed over the tensor-parallel group is not shrunk under the caller,
has any number of elements, and must be the same on all ranks; `torch.autograd.grad`, `retain_graph` and inputs that need no
gradient work.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from reactivate._types import DEVICE, Policy, Storage
from reactivate.dropin import _megatron_policy
from reactivate.dropin._autocast_state import AutocastState
from reactivate.dropin._calls import Chosen, call_region, is_first_of, with_tracker
from reactivate.dropin._installation import Installation, Tally, again, library
from reactivate.dropin._megatron_state import CHECKPOINTING, open_regions, parallel, rng_tracker, tensor_parallel_group
from reactivate.dropin._without_output import SeveralWithoutOutput, WithoutOutput
from reactivate.errors import UsageError
from reactivate.guards import Guards
from reactivate.storage import Sharded

__all__ = [
    "BlockLevelCheckpointManager",
    "CheckpointFunction",
    "CheckpointManager",
    "CheckpointWithoutOutput",
    "CheckpointWithoutOutputManager",
    "MHCBlockRecomputeManager",
    "checkpoint",
    "install",
    "is_checkpointing",
    "parallel",
    "policy",
]

_NOT_MEGATRONS = ("install", "parallel", "policy")
_NAMES = {name: name for name in __all__ if name not in _NOT_MEGATRONS}

_AUTOCAST = AutocastState()

tally = Tally()


def checkpoint(function: Callable[..., Any], distribute_saved_activations: bool, *args: Any) -> Any:
    """`megatron.core.tensor_parallel.checkpoint` on this engine: the same arguments and meanings.

    Args:
        function: what to checkpoint; called with `args`.
        distribute_saved_activations: keep one part of `args[0]` on each tensor-parallel rank, and gather it for the
            recomputation (`storage.Sharded`).
        args: of the function; the first is a tensor if it is to be distributed.

    Raises:
        UsageError: there is nothing to distribute, or no group to distribute it over.
        StorageError: `args[0]` is not the same on all ranks, as with sequence parallelism; see `storage.Sharded`.
        ReactivateError: see `reactivate.checkpoint`.

    Examples:
        >>> import torch
        >>> from reactivate.dropin.megatron import checkpoint
        >>> x = torch.ones(2, requires_grad=True)
        >>> checkpoint(lambda x: x.sin().exp(), False, x).sum().backward()
    """
    inputs: Storage = DEVICE
    if distribute_saved_activations:
        is_first = is_first_of(args, "checkpoint(function, distribute_saved_activations=True, *args)")
        inputs = Chosen(Sharded(tensor_parallel_group(), least_bytes=0), is_first)
    tally.add()
    return call_region(function, args, {}, _guards(), inputs)


def _guards() -> Guards:
    return with_tracker(rng_tracker()).adding(CHECKPOINTING)


def is_checkpointing() -> bool:
    """Return whether the calling code runs in a region of `checkpoint`, in its forward or in a recomputation.

    Megatron's own is false again after the first of two nested regions ends; this one is not.
    """
    return open_regions.get() > 0


class CheckpointFunction:
    """`megatron.core.tensor_parallel.random.CheckpointFunction`, for code that applies it directly."""

    @staticmethod
    def apply(run_function: Callable[..., Any], distribute_saved_activations: bool, *args: Any) -> Any:
        """`checkpoint(run_function, distribute_saved_activations, *args)`."""
        return checkpoint(run_function, distribute_saved_activations, *args)


class CheckpointWithoutOutput(WithoutOutput):
    """Recompute a function whose output goes as well, once its consumer has saved it.

    `checkpoint` calls the function as a region. `discard_output_and_register_recompute` takes its output from every op
    between it and `hook_tensor` that saved it; the backward of such an op recomputes the function. So the output is freed
    as soon as the caller lets go of it. Nothing is resized: who still has the output can read it.

    Each backward recomputes, also with `retain_graph`, `autograd.grad` and double backward. What saved-tensor hooks have
    packed, of a region around both calls say, stays as they packed it.

    Args:
        fp8: without meaning for the results, since the state of 8-bit layers is restored in any case.
        ckpt_manager: a `CheckpointWithoutOutputManager`, which then discards the output in the place of
            `discard_output_and_register_recompute`.
        retain_input_tensors: without meaning: an output that has the memory of an input is never discarded, since the
            region keeps its inputs.

    Raises:
        UsageError: in backward, if the output was never discarded: the checkpoint would save nothing.

    Source: `megatron.core.tensor_parallel.random`, Megatron Core 0.16; `ckpt_manager` and `retain_input_tensors` in later
    ones.

    Examples:
        >>> import torch
        >>> from reactivate.dropin.megatron import CheckpointWithoutOutput
        >>> norm, linear = torch.nn.LayerNorm(8), torch.nn.Linear(8, 8)
        >>> checkpoint = CheckpointWithoutOutput()
        >>> hidden = checkpoint.checkpoint(norm, torch.randn(4, 8, requires_grad=True))
        >>> out = linear(hidden)
        >>> checkpoint.discard_output_and_register_recompute(out)
        >>> del hidden
        >>> out.sum().backward()
    """

    def checkpoint(self, run_function: Callable[..., Any], *args: Any) -> Any:
        """Call `run_function(*args)` as a region; return what it returns."""
        tally.add()
        return super().checkpoint(run_function, *args)

    def guards(self) -> Guards:
        """Return the guards of a region: those of `checkpoint`, and TransformerEngine's autocast."""
        return _guards().adding(_AUTOCAST)


class CheckpointWithoutOutputManager(SeveralWithoutOutput):
    """Discard the outputs of several checkpoints at once, each of which was made with this as its `ckpt_manager`.

    A checkpoint whose input is the output of another one keeps that.

    Attributes:
        checkpoints: of which the outputs are to be discarded.
        is_last_layer_in_recompute_block: a mark of Megatron's layers for each other, without meaning here.

    Source: `megatron.core.tensor_parallel.random`, Megatron Core after 0.16.
    """


BlockLevelCheckpointManager = CheckpointManager = MHCBlockRecomputeManager = CheckpointWithoutOutputManager
"""Megatron's older names of it."""


def policy(
    *,
    recompute_granularity: str | None = None,
    recompute_method: str | None = None,
    recompute_num_layers: int | None = None,
    recompute_modules: Sequence[str] | None = None,
    distribute_saved_activations: bool = False,
    sequence_parallel: bool = False,
) -> Policy:
    """Return the policy that these fields of Megatron's `TransformerConfig` stand for.

    Args:
        recompute_granularity: "full": whole layers; "selective": parts of them; None: nothing.
        recompute_method: for "full": "uniform" recomputes every layer, "block" the first ones of the model, or of the
            pipeline stage that the model is.
        recompute_num_layers: for "uniform" 1; for "block" the number of layers.
        recompute_modules: for "selective": of "core_attn", "mlp", "moe" and "shared_experts"; ["core_attn"] if None.
        distribute_saved_activations: keep one part of each layer's inputs on each tensor-parallel rank.
        sequence_parallel: whether the activations between layers are sharded already.

    Raises:
        UsageError: a field has a value that Megatron refuses, or one that stands for nothing here; the message says why.

    Examples:
        >>> import torch, reactivate
        >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        >>> model = torch.nn.TransformerEncoder(layer, 4)
        >>> policy = reactivate.dropin.megatron.policy(
        ...     recompute_granularity="full", recompute_method="block", recompute_num_layers=3
        ... )
        >>> reactivate.apply(model, policy).regions
        ('layers.0', 'layers.1', 'layers.2')
    """
    if distribute_saved_activations and sequence_parallel:
        raise UsageError(
            "distribute_saved_activations=True goes with sequence_parallel=False: with sequence parallelism each rank has a "
            "part of its own already."
        )
    if distribute_saved_activations and recompute_granularity != "full":
        raise UsageError(
            "distribute_saved_activations=True is about the inputs of whole layers: it goes with recompute_granularity='full'"
            f", not {recompute_granularity!r}."
        )
    inputs: Storage = Sharded(tensor_parallel_group(), least_bytes=0) if distribute_saved_activations else DEVICE
    return _megatron_policy.policy_of(
        recompute_granularity, recompute_method, recompute_num_layers, recompute_modules, inputs
    )


def install() -> Installation:
    """Run everything that calls Megatron's `tensor_parallel.checkpoint` on this engine, without an edit.

    Megatron's own layers then call it as their configuration says, in chunks of `recompute_num_layers` layers too. The
    tensor-parallel group and the RNG tracker are Megatron's.

    Returns:
        A handle with `remove()`; also a context manager. If it is installed already, the same handle.

    Raises:
        UsageError: megatron-core is not installed.
    """
    upstream = library("megatron.core.tensor_parallel.random", "dropin.megatron.install()")
    return again(upstream.__name__) or Installation(upstream, sys.modules["reactivate.dropin.megatron"], _NAMES)

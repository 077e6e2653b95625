"""Checkpoints whose outputs are dropped after use: Megatron's `CheckpointWithoutOutput` and its manager, on this engine."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from reactivate._region.discarded import Outputs, call_and_save, discard
from reactivate._region.options import Options
from reactivate._region.run import run
from reactivate._run import run_untraced
from reactivate._text.words import described, name_of
from reactivate.errors import MutationError, UsageError
from reactivate.guards import DEFAULT, Guards


class _NoCheckpointError(UsageError, TypeError):
    """Something else was given for a checkpoint, which is Megatron's `TypeError` (Rule 18)."""


class _Registration:
    """A mark: the output was discarded, or not yet."""

    is_done = False


class WithoutOutput:
    """Recompute a function whose output goes as well, once its consumer has saved it.

    `dropin.megatron.CheckpointWithoutOutput` is this with Megatron's state, and says what the arguments are.
    """

    def __init__(self, fp8: Any = False, ckpt_manager: Any = None, retain_input_tensors: bool = False) -> None:
        self.fp8 = fp8
        self.ckpt_manager = ckpt_manager
        self.retain_input_tensors = retain_input_tensors
        self._name = ""
        self._outputs: Outputs | None = None
        self._registration: _Registration | None = None

    def guards(self) -> Guards:
        """Return the guards of a region. A subclass may have others."""
        return DEFAULT

    def checkpoint(self, run_function: Callable[..., Any], *args: Any) -> Any:
        """Call `run_function(*args)` as a region.

        Returns:
            What it returns: a tensor, or containers with tensors in them.
        """
        self._name = name_of(run_function)
        options = Options(tuple(self.guards()), name=self._name)
        result, saved = run_untraced(run, options, functools.partial(call_and_save, run_function), args, {})
        self._registration = _Registration()
        self._outputs = None if saved is None else Outputs(result, saved, args)  # None under `torch.no_grad()`
        for tensor in self._outputs.tensors.values() if self._outputs is not None else ():
            tensor.register_hook(functools.partial(_refuse_unless_done, self._registration, self._name))
        if self.ckpt_manager is not None:
            self.ckpt_manager.add_checkpoint(self)
        return result

    def discard_output_and_register_recompute(self, hook_tensor: Tensor) -> None:
        """Let go of the output in all that leads to `hook_tensor`.

        Args:
            hook_tensor: what the output's consumer computed from it; call this before anything is computed in place
                of the output.

        Raises:
            UsageError: nothing was checkpointed, or `hook_tensor` does not depend on the output.
            MutationError: the output was modified in place.
        """
        if self.ckpt_manager is None:
            _discard([self], hook_tensor)

    def undiscarded(self, hook_tensor: Tensor) -> Outputs | None:
        """Return the outputs, which lead to `hook_tensor`; None if there is nothing to discard."""
        if self._registration is None or self._registration.is_done:
            raise UsageError(
                "discard_output_and_register_recompute() discards the output of a checkpoint() before it, and there is none. "
                "Call checkpoint(run_function, *args) first, once for each call."
            )
        outputs = self._outputs
        if outputs is None or not outputs.tensors or not hook_tensor.requires_grad:  # nothing holds an output
            return None
        modified = outputs.modified()
        if modified is not None:
            raise MutationError(
                f"The output of `{self._name}`, {described(modified)}, was modified in place after checkpoint() returned it, "
                "so that a recomputation would give other values. Use the out-of-place op."
            )
        if not outputs.lead_to(hook_tensor):
            raise UsageError(
                f"hook_tensor, {described(hook_tensor)}, does not depend on the output of `{self._name}`: its backward would "
                "not recompute the output. Pass what the consumer of the output returns."
            )
        return outputs

    def let_go(self) -> None:
        """Note that the outputs are discarded."""
        assert self._registration is not None
        self._registration.is_done = True
        self._outputs = None


class SeveralWithoutOutput:
    """Discards the outputs of several checkpoints at once, each of which was made with this as its `ckpt_manager`."""

    def __init__(self) -> None:
        self.checkpoints: list[WithoutOutput] = []
        self.is_last_layer_in_recompute_block = False

    def add_checkpoint(self, ckpt: WithoutOutput) -> None:
        """Add a checkpoint whose output is to be discarded.

        Raises:
            UsageError: it is none, or has not been called; a TypeError or ValueError too, as Megatron's.
        """
        if not isinstance(ckpt, WithoutOutput):
            raise _NoCheckpointError(
                f"add_checkpoint(ckpt) takes a CheckpointWithoutOutput, got {type(ckpt).__name__}."
            )
        if ckpt._registration is None:
            raise UsageError(
                "add_checkpoint(ckpt) takes a CheckpointWithoutOutput that was called. Call ckpt.checkpoint(run_function, "
                "*args) first, or give it this manager: CheckpointWithoutOutput(ckpt_manager=manager)."
            )
        self.checkpoints.append(ckpt)

    def discard_all_outputs_and_register_unified_recompute(self, hook_tensor: Tensor) -> None:
        """Let go of all outputs in all that leads to `hook_tensor`, which was computed from each of them.

        Raises:
            UsageError, MutationError: as `CheckpointWithoutOutput.discard_output_and_register_recompute`.
        """
        _discard(self.checkpoints, hook_tensor)


def _discard(checkpoints: Sequence[WithoutOutput], hook_tensor: Tensor) -> None:
    found = [checkpoint.undiscarded(hook_tensor) for checkpoint in checkpoints]
    discard([outputs for outputs in found if outputs is not None], hook_tensor)
    for checkpoint in checkpoints:
        checkpoint.let_go()


def _refuse_unless_done(registration: _Registration, name: str, gradient: Tensor) -> None:
    if not registration.is_done:
        raise UsageError(
            f"The output of `{name}` was checkpointed to be discarded, and never was, so that the checkpoint saves nothing. "
            "Call discard_output_and_register_recompute(hook_tensor) with what the consumer of the output returns, or use "
            "reactivate.checkpoint, which keeps the output."
        )

"""Checkpoints whose outputs are dropped after use: Megatron's `CheckpointWithoutOutput` and its manager, on this engine."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor

from reactivate._engine.discarded import Outputs, call_and_return
from reactivate._engine.record import Options
from reactivate._engine.run import run
from reactivate._run import run_untraced
from reactivate._text.words import described, name_of
from reactivate._torch.containers import flatten
from reactivate.errors import MutationError, UsageError
from reactivate.guards import DEFAULT, Guards


class _Registration:
    """A mark: the output was discarded, or not yet."""

    is_done = False


class WithoutOutput:
    """Recompute a function whose output goes as well, once its consumer has saved it.

    `dropin.megatron.CheckpointWithoutOutput` is this with Megatron's state, and says what the arguments are.
    """

    def __init__(self, fp8: bool | None = False, ckpt_manager: Any = None) -> None:
        self.fp8 = fp8
        self.ckpt_manager = ckpt_manager
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
        result = run_untraced(run, options, functools.partial(call_and_return, run_function), args, {})
        tensors = [item for item in flatten(result)[0] if isinstance(item, Tensor) and item.requires_grad]
        self._registration = _Registration()
        self._outputs = Outputs(tensors) if tensors else None  # None under `torch.no_grad()`
        for tensor in tensors:
            tensor.register_hook(functools.partial(_refuse_unless_done, self._registration, self._name))
        if self.ckpt_manager is not None:
            self.ckpt_manager.add_checkpoint(self)
        return result

    def discard_output_and_register_recompute(self, hook_tensor: Tensor) -> None:
        """Let go of the output in all that leads to `hook_tensor`.

        Args:
            hook_tensor: what the output's consumer computed from it; call this before anybody computes anything in place
                of the output.

        Raises:
            UsageError: nothing was checkpointed, or `hook_tensor` does not depend on the output.
            MutationError: the output was modified in place.
        """
        if self.ckpt_manager is None:
            self.discard(hook_tensor)

    def discard(self, hook_tensor: Tensor) -> None:
        """Let go of the output in all that leads to `hook_tensor`, also with a manager."""
        if self._registration is None or self._registration.is_done:
            raise UsageError(
                "discard_output_and_register_recompute() discards the output of a checkpoint() before it, and there is none. "
                "Call checkpoint(run_function, *args) first, once for each call."
            )
        outputs, self._outputs = self._outputs, None
        if outputs is not None and hook_tensor.requires_grad:  # without a gradient nothing leads to it
            self._discard(outputs, hook_tensor)
        self._registration.is_done = True

    def _discard(self, outputs: Outputs, hook_tensor: Tensor) -> None:
        modified = outputs.modified()
        if modified is not None:
            raise MutationError(
                f"The output of `{self._name}`, {described(modified)}, was modified in place after checkpoint() returned it, "
                "so that a recomputation would give other values. Use the out-of-place op."
            )
        if outputs.discard_from(hook_tensor) is None:
            raise UsageError(
                f"hook_tensor, {described(hook_tensor)}, does not depend on the output of `{self._name}`: its backward would "
                "not recompute the output. Pass what the consumer of the output returns."
            )


class SeveralWithoutOutput:
    """Discards the outputs of several checkpoints at once, each of which was made with this as its `ckpt_manager`."""

    def __init__(self) -> None:
        self.checkpoints: list[WithoutOutput] = []

    def add_checkpoint(self, ckpt: WithoutOutput) -> None:
        """Add a checkpoint whose output is to be discarded."""
        self.checkpoints.append(ckpt)

    def discard_all_outputs_and_register_unified_recompute(self, hook_tensor: Tensor) -> None:
        """Let go of all outputs in all that leads to `hook_tensor`, which was computed from each of them.

        Raises:
            UsageError, MutationError: as `CheckpointWithoutOutput.discard_output_and_register_recompute`.
        """
        for ckpt in self.checkpoints:
            ckpt.discard(hook_tensor)


def _refuse_unless_done(registration: _Registration, name: str, gradient: Tensor) -> None:
    if not registration.is_done:
        raise UsageError(
            f"The output of `{name}` was checkpointed to be discarded, and never was, so that the checkpoint saves nothing. "
            "Call discard_output_and_register_recompute(hook_tensor) with what the consumer of the output returns, or use "
            "reactivate.checkpoint, which keeps the output."
        )

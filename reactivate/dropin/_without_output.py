"""A checkpoint whose output is dropped after use: Megatron's `CheckpointWithoutOutput`, on this engine."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ClassVar

from torch import Tensor

from reactivate._engine.discarded import Outputs, call_and_return
from reactivate._engine.record import Options
from reactivate._engine.run import run
from reactivate._run import run_untraced
from reactivate._text.words import described, name_of
from reactivate.errors import MutationError, UsageError
from reactivate.guards import DEFAULT, Guards

__all__ = ["CheckpointWithoutOutput"]


class _Registration:
    """A mark: the output was discarded, or not yet."""

    is_done = False


class CheckpointWithoutOutput:
    """Recompute a function whose output goes as well, once its consumer has saved it.

    `checkpoint` calls the function as a region. `discard_output_and_register_recompute` takes its output from every op
    between it and `hook_tensor` that saved it; the backward of such an op recomputes the function. So the output is freed
    as soon as the caller lets go of it. Nothing is resized: who still has the output can read it.

    Each backward recomputes, also with `retain_graph`, `autograd.grad` and double backward. What saved-tensor hooks have
    packed, of a region around both calls say, stays as they packed it.

    Args:
        fp8: without meaning for the results, since the state of 8-bit layers is restored in any case.

    Raises:
        UsageError: in backward, if the output was never discarded: the checkpoint would save nothing.

    Source: `megatron.core.tensor_parallel.random`, Megatron Core 0.16.

    Example:
        >>> import torch
        >>> from reactivate.dropin._without_output import CheckpointWithoutOutput
        >>> norm, linear = torch.nn.LayerNorm(8), torch.nn.Linear(8, 8)
        >>> checkpoint = CheckpointWithoutOutput()
        >>> hidden = checkpoint.checkpoint(norm, torch.randn(4, 8, requires_grad=True))
        >>> out = linear(hidden)
        >>> checkpoint.discard_output_and_register_recompute(out)
        >>> del hidden
        >>> out.sum().backward()
    """

    guards: ClassVar[Guards] = DEFAULT
    """The guards of every region. A subclass may have others."""

    def __init__(self, fp8: bool | None = False) -> None:
        self.fp8 = fp8
        self._name = ""
        self._outputs: Outputs | None = None
        self._registration: _Registration | None = None

    def checkpoint(self, run_function: Callable[..., Any], *args: Any) -> Any:
        """Call `run_function(*args)` as a region.

        Returns:
            What it returns: a tensor, or a tuple with tensors in it.
        """
        self._name = name_of(run_function)
        options = Options(tuple(self.guards), name=self._name)
        result = run_untraced(run, options, functools.partial(call_and_return, run_function), args, {})
        outputs = [result] if isinstance(result, Tensor) else result if isinstance(result, tuple) else []
        tensors = [item for item in outputs if isinstance(item, Tensor) and item.requires_grad]
        self._registration = _Registration()
        self._outputs = Outputs(tensors) if tensors else None  # None under `torch.no_grad()`
        for tensor in tensors:
            tensor.register_hook(functools.partial(_refuse_unless_done, self._registration, self._name))
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
        if self._registration is None or self._registration.is_done:
            raise UsageError(
                "discard_output_and_register_recompute() discards the output of a checkpoint() before it, and there is none. "
                "Call checkpoint(run_function, *args) first, once for each call."
            )
        outputs, self._outputs = self._outputs, None
        if outputs is not None:
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


def _refuse_unless_done(registration: _Registration, name: str, gradient: Tensor) -> None:
    if not registration.is_done:
        raise UsageError(
            f"The output of `{name}` was checkpointed to be discarded, and never was, so that the checkpoint saves nothing. "
            "Call discard_output_and_register_recompute(hook_tensor) with what the consumer of the output returns, or use "
            "reactivate.checkpoint, which keeps the output."
        )

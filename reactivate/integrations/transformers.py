"""transformers: a callback of its Trainer that applies a policy while a model is trained."""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

from reactivate._model.handle import Handle
from reactivate._text.warnings import warn
from reactivate._types import Policy
from reactivate.errors import UsageError
from reactivate.integrations._hosts import bases_of, check_host
from reactivate.integrations._training import Training

__all__ = ["ActivationCheckpointing"]

_BASES = bases_of(["transformers"], "TrainerCallback")


class ActivationCheckpointing(*_BASES):  # type: ignore[misc]
    """Recompute activations of a model while a `transformers.Trainer` trains it.

    The policy is applied when training begins and removed when it ends. Checkpoints have the names that they have without
    it. After an exception it stays until the next training, or `handle.remove()`, since Trainer calls no callback then.

    Args:
        policy: a policy (see `reactivate.policies`), a plan, or the text of a policy: "full()".
        plan: a file that `Plan.save` wrote.
        budget: plan at the first batch, for a peak of "8GiB" or "60%" as `reactivate.plan` takes it. The model must return
            the loss, and there may be one process.

    Attributes:
        handle: what is applied: a `reactivate.Handle`, None outside of training.

    Raises:
        UsageError: not exactly one of `policy`, `plan` and `budget` is given, or it cannot be understood; or transformers
            is not installed. When training begins: transformers' own activation checkpointing is on.

    Examples:
        >>> import importlib.util
        >>> from reactivate.integrations.transformers import ActivationCheckpointing
        >>> if importlib.util.find_spec("transformers"):
        ...     callbacks = [ActivationCheckpointing("first_match(save_ops('linear'), full())")]
    """

    def __init__(
        self,
        policy: Policy | str | None = None,
        *,
        plan: str | os.PathLike[str] | None = None,
        budget: float | str | None = None,
    ) -> None:
        check_host(_BASES, "integrations.transformers.ActivationCheckpointing", "transformers accelerate")
        super().__init__()
        self._training = Training("ActivationCheckpointing", policy, plan, budget)

    @property
    def handle(self) -> Handle | None:
        return self._training.handle

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        model, optimizer = kwargs["model"], kwargs.get("optimizer")
        if any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
            name = _name_of_theirs(args)
            raise UsageError(
                "ActivationCheckpointing: activation checkpointing of transformers is on, so that layers would be recomputed "
                f"twice. Leave out TrainingArguments({name}=True), or call model.{name}_disable()."
            )
        if state.is_world_process_zero and _searches_for_unused_parameters(args, model):
            warn(
                "ActivationCheckpointing: Trainer turns on DDP's find_unused_parameters where its own checkpointing is off, "
                "so that every step searches the graph for unused parameters. If your model has none, pass "
                "TrainingArguments(ddp_find_unused_parameters=False), as Trainer itself does for "
                f"{_name_of_theirs(args)}=True. If it has some, pass True."
            )
        self._training.begin(model, getattr(optimizer, "optimizer", optimizer))  # without accelerate's wrapper

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._training.end()


def _name_of_theirs(args: Any) -> str:
    """Return the name of transformers' own switch: another one since transformers 5.23."""
    return "activation_checkpointing" if hasattr(args, "activation_checkpointing") else "gradient_checkpointing"


def _searches_for_unused_parameters(args: Any, model: Any) -> bool:
    """Return whether Trainer told DDP to, which was not asked for, and which it would not do with its own checkpointing."""
    if args.ddp_find_unused_parameters is not None:
        return False
    state = import_module("accelerate.state").AcceleratorState()
    is_ddp = state.distributed_type.value.startswith("MULTI_") and getattr(state, "fsdp_plugin", None) is None
    return is_ddp and isinstance(model, import_module("transformers").PreTrainedModel)

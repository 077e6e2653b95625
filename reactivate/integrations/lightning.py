"""Lightning: a callback that applies a policy while a model is fitted."""

from __future__ import annotations

import os
from typing import Any

from reactivate._model.handle import Handle
from reactivate._types import Policy
from reactivate.errors import UsageError
from reactivate.integrations._hosts import bases_of, check_host
from reactivate.integrations._training import Training

__all__ = ["ActivationCheckpointing"]

# One class for both names of the package: each looks for its own base class.
_BASES = bases_of(["lightning.pytorch.callbacks", "pytorch_lightning.callbacks"], "Callback")


class ActivationCheckpointing(*_BASES):  # type: ignore[misc]
    """Recompute activations of a LightningModule while it is fitted.

    The policy is applied at the beginning of `Trainer.fit` and removed at its end, also after an exception. Checkpoints
    have the names that they have without it. It works with `lightning` and with `pytorch_lightning`, and in the YAML of
    `LightningCLI` as `class_path: reactivate.integrations.lightning.ActivationCheckpointing`.

    Args:
        policy: a policy (see `reactivate.policies`), a plan, or the text of a policy: "full()".
        plan: a file that `Plan.save` wrote.
        budget: plan at the first batch, for a peak of "8GiB" or "60%" as `reactivate.plan` takes it. `module` must name a
            module that returns the loss, and there may be one optimizer and one process.
        module: the path of the module in the LightningModule that the policy is for, "model", say; by default all of it.

    Attributes:
        handle: what is applied: a `reactivate.Handle`, None outside of `fit`.

    Raises:
        UsageError: not exactly one of `policy`, `plan` and `budget` is given, or it cannot be understood; or Lightning is
            not installed.

    Examples:
        >>> import importlib.util
        >>> from reactivate.integrations.lightning import ActivationCheckpointing
        >>> if importlib.util.find_spec("lightning"):
        ...     import lightning
        ...     checkpointing = ActivationCheckpointing("recompute_every(2)", module="model")
        ...     trainer = lightning.Trainer(callbacks=[checkpointing], accelerator="cpu", logger=False)
    """

    def __init__(
        self,
        policy: Policy | str | None = None,
        *,
        plan: str | os.PathLike[str] | None = None,
        budget: float | str | None = None,
        module: str = "",
    ) -> None:
        check_host(_BASES, "integrations.lightning.ActivationCheckpointing", "lightning")
        super().__init__()
        self._training = Training("ActivationCheckpointing", policy, plan, budget)
        self._plans = budget is not None
        self._module = module

    @property
    def handle(self) -> Handle | None:
        return self._training.handle

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        try:
            model = pl_module.get_submodule(self._module)
        except AttributeError as error:
            raise UsageError(f"ActivationCheckpointing(module={self._module!r}): {error}.") from None
        self._training.begin(model, self._optimizer_of(trainer) if self._plans else None)

    def _optimizer_of(self, trainer: Any) -> Any:
        if len(trainer.optimizers) != 1:
            raise UsageError(
                f"ActivationCheckpointing(budget=...) plans for one optimizer; configure_optimizers gave "
                f"{len(trainer.optimizers)}. Plan before training, reactivate.plan(model, batch, budget=...), and pass the "
                "plan as policy=."
            )
        return trainer.optimizers[0]

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        if self.handle is None:
            raise UsageError(
                f"ActivationCheckpointing(budget=...): the training step did not call {self._module or 'the LightningModule'}"
                ", so nothing was planned. Name the module that it calls and that returns the loss: module='model'."
            )

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        self._training.end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._training.end()

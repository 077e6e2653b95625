"""torchtune's fields."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from torch.nn import Module

from reactivate._types import DEVICE, Policy, Storage
from reactivate.errors import UsageError
from reactivate.integrations.recipe._base import OP_OR_NUMBER, Example, Recipe, check_op_or_number
from reactivate.integrations.recipe._layers import every, layers_of, recompute
from reactivate.integrations.recipe._selective_op import selective_op
from reactivate.policies import full, none
from reactivate.storage import Host

_LAYER = "TransformerSelfAttentionLayer"  # what the switch recomputes, wherever in a model of torchtune's


@dataclass(frozen=True, repr=False)
class Torchtune(Recipe):
    """Fields of torchtune 0.6: one switch for all layers, or a mode with an option."""

    whose = "torchtune"

    enable_activation_checkpointing: Annotated[bool, "True or False"] = False
    enable_activation_offloading: Annotated[bool, "True or False"] = False
    ac_mode: Annotated[Literal["none", "full", "selective"] | None, "'none', 'full' or 'selective'"] = None
    ac_option: Annotated[int | str | None, OP_OR_NUMBER] = None

    def __post_init__(self) -> None:
        if self.enable_activation_offloading and not self.enable_activation_checkpointing:
            raise UsageError(
                "recipe: enable_activation_offloading=True needs enable_activation_checkpointing=True, as in torchtune: what "
                "goes to the host is what recomputed layers are called with."
            )
        if self.enable_activation_checkpointing and self.ac_mode is not None:
            raise UsageError(
                f"recipe: enable_activation_checkpointing=True and ac_mode={self.ac_mode!r} are two switches for one "
                "thing. Leave one out."
            )
        self._check_option()

    def _check_option(self) -> None:
        check_op_or_number("ac_option", self.ac_option)
        if self.ac_option is not None and self.ac_mode is None:
            raise UsageError(
                f"recipe: ac_option={self.ac_option!r} is an option of ac_mode='selective', and ac_mode is "
                f"{self.ac_mode!r}. Set that mode, or leave the option out."
            )
        if self.ac_mode == "selective" and self.ac_option is None:
            raise UsageError(f"recipe: ac_mode='selective' needs ac_option: {OP_OR_NUMBER}.")

    def policy_for(self, model: Module, example: Example | None = None) -> Policy:
        if self.enable_activation_checkpointing:
            paths = [path for path, module in model.named_modules() if _is_layer(module)]
            inputs: Storage = Host() if self.enable_activation_offloading else DEVICE
            return recompute(paths, inputs) if paths else full(inputs=inputs)
        if self.ac_mode in (None, "none"):
            return none()
        layers = layers_of(model)
        if self.ac_mode == "full":
            return recompute(layers)
        if self.ac_option == "op":
            return selective_op(layers)
        return recompute(every(layers, int(self.ac_option or 0), "ac_option"))


def _is_layer(module: Module) -> bool:
    return any(kind.__name__ == _LAYER for kind in type(module).__mro__)

"""The layers that torchtune and torchtitan go through, and how they count them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch.nn import Module, ModuleDict, ModuleList, Sequential

from reactivate._modules.blocks import blocks_of
from reactivate._types import DEVICE, Policy, Site, Storage
from reactivate.errors import UsageError
from reactivate.policies import recompute_modules

Layers = dict[str, Module]


def layers_of(model: Module) -> Layers:
    """{path: layer}: the children of `model.layers`; of a model without, its blocks.

    Raises:
        UsageError: it has neither.
    """
    layers = getattr(model, "layers", None)
    if isinstance(layers, (ModuleList, ModuleDict, Sequential)) and len(layers):
        return {f"layers.{name}": layer for name, layer in layers.named_children()}
    blocks = blocks_of(model)
    if not blocks:
        raise UsageError(
            f"recipe: {type(model).__name__} has no layers to choose from: neither a list `layers` nor other repeated "
            "modules. Name modules with {'policy': {'recompute_modules': [...]}}."
        )
    return blocks


def every(layers: Layers, k: int, asked_by: str) -> Layers:
    """The k-th of `layers`, the 2k-th and so on, counted from 1 in each model.

    Raises:
        UsageError: there are fewer than `k`, so that none would be chosen.
    """
    if k > len(layers):
        raise UsageError(
            f"recipe: {asked_by}={k} is more than the {len(layers)} layers of the model ({', '.join(layers)}): none "
            f"would be recomputed. It takes 1 to {len(layers)}."
        )
    return {path: layer for number, (path, layer) in enumerate(layers.items(), 1) if number % k == 0}


def recompute(paths: Iterable[str], inputs: Storage = DEVICE) -> Policy:
    """The modules at `paths` are regions, whose inputs wait in a storage."""
    return recompute_modules(Exactly(tuple(paths)), inputs=inputs)


@dataclass(frozen=True, repr=False)
class Exactly:
    """Selects the modules at these paths: none that ends alike, as the name itself would."""

    paths: tuple[str, ...]

    def __repr__(self) -> str:
        return ", ".join(map(repr, self.paths))

    def __call__(self, site: Site) -> bool:
        return site.path in self.paths

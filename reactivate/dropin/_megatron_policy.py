"""Megatron's recompute options as policies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from reactivate._text.words import did_you_mean
from reactivate._types import Action, Policy, Recompute, Site, Storage
from reactivate.errors import UsageError
from reactivate.policies import full, none, recompute_modules
from reactivate.policies._base import ReadyMade, written
from reactivate.policies._select import Selector


def _is_moe(site: Site) -> bool:
    return any(kind.__name__ == "MoELayer" for kind in type(site.module).__mro__)


def _dense_mlp(site: Site) -> bool:
    return site.path.rpartition(".")[2] == "mlp" and not _is_moe(site)


_MODULES: dict[str, Selector] = {
    "core_attn": "core_attention",
    "mlp": _dense_mlp,
    "moe": _is_moe,
    "shared_experts": "shared_experts",
}
_WITHOUT_OUTPUT = ("layernorm", "moe_act", "mla_up_proj")


@dataclass(frozen=True, repr=False)
class _FirstBlocks(ReadyMade):
    count: int
    inputs: Storage

    def __repr__(self) -> str:
        return written("the first blocks", self.count, inputs=self.inputs)

    def __call__(self, site: Site) -> Action | None:
        return Recompute(self.inputs) if site.block is not None and site.block < self.count else None


def policy_of(
    granularity: str | None, method: str | None, layers: int | None, modules: Sequence[str] | None, inputs: Storage
) -> Policy:
    """Return the policy that Megatron's fields stand for.

    Raises:
        UsageError: they stand for none.
    """
    if granularity is None:
        for name, value in (
            ("recompute_method", method),
            ("recompute_num_layers", layers),
            ("recompute_modules", modules),
        ):
            if value is not None:
                raise UsageError(
                    f"{name}={value!r} without recompute_granularity recomputes nothing: give that as well."
                )
        return none()
    if granularity == "full":
        return _whole_layers(method, layers, modules, inputs)
    if granularity == "selective":
        return _parts_of_layers(method, layers, ["core_attn"] if modules is None else modules)
    raise UsageError(f"recompute_granularity={granularity!r}: there are 'full', 'selective' and None.")


def _whole_layers(method: str | None, layers: int | None, modules: Sequence[str] | None, inputs: Storage) -> Policy:
    if modules is not None:
        raise UsageError(f"recompute_modules={modules!r} goes with recompute_granularity='selective', not with 'full'.")
    if method not in ("uniform", "block"):
        raise UsageError(f"recompute_granularity='full' takes recompute_method='uniform' or 'block'; got {method!r}.")
    if not isinstance(layers, int) or isinstance(layers, bool) or layers < 1:
        raise UsageError(f"recompute_granularity='full' takes recompute_num_layers of at least 1; got {layers!r}.")
    if method == "block":
        return _FirstBlocks(layers, inputs)
    if layers > 1:
        raise UsageError(
            f"recompute_method='uniform' with recompute_num_layers={layers} is one region around {layers} layers, and a "
            "policy makes regions of modules. Use 1, or dropin.megatron.checkpoint around a function that runs these layers. "
            "Megatron's own TransformerBlock does so under dropin.megatron.install()."
        )
    return full(inputs=inputs)


def _parts_of_layers(method: str | None, layers: int | None, modules: Sequence[str]) -> Policy:
    for name, value in (("recompute_method", method), ("recompute_num_layers", layers)):
        if value is not None:
            raise UsageError(f"recompute_granularity='selective' takes {name}=None; got {value!r}.")
    if isinstance(modules, str) or not modules:
        raise UsageError(f"recompute_modules is a list of names, of {', '.join(_MODULES)}; got {modules!r}.")
    for name in modules:
        if name in _WITHOUT_OUTPUT:
            raise UsageError(
                f"recompute_modules={name!r} is no policy: Megatron recomputes it without keeping its output "
                "(CheckpointWithoutOutput). A region around it keeps its input and saves nothing, since what follows keeps "
                "the output."
            )
        if name not in _MODULES:
            raise UsageError(
                f"recompute_modules={name!r}: there are {', '.join(_MODULES)}.{did_you_mean(name, _MODULES)}"
            )
    return recompute_modules(*(_MODULES[name] for name in modules))

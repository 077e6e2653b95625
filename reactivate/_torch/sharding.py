"""The state that `fully_shard` keeps for a module: torch has no public name for it."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any

from torch.nn import Module

_ADDED_UP = "unsharded_accumulated_grad"


def sharded_class() -> Any:
    """Return the class of modules that `fully_shard` has sharded; no class where nobody has imported the library."""
    library = sys.modules.get("torch.distributed.fsdp")
    return () if library is None else library.FSDPModule


def sharded_in(modules: Iterable[Module]) -> list[Module]:
    """Return those of some modules that `fully_shard` has sharded."""
    sharded = sharded_class()
    return [module for module in modules if isinstance(module, sharded)]


def is_sharded(model: Module) -> bool:
    """Return whether `fully_shard` has sharded parameters of a model."""
    return bool(sharded_in(model.modules()))


def sharding_state(module: Module) -> Any:
    """Return the object in which `fully_shard` keeps what it knows of a module; None where this torch does not show it."""
    ask = getattr(module, "_get_fsdp_state", None)
    return None if ask is None else ask()


def is_root(module: Module) -> bool:
    """Return whether a sharded module has run its forward as the outermost one, so that it answers for those in it."""
    return bool(getattr(sharding_state(module), "_is_root", False))


def has_unreduced_gradients(modules: Iterable[Module]) -> bool:
    """Return whether sharded modules keep gradients of whole parameters, which a backward without a reduction has left."""
    return any(
        getattr(parameter, _ADDED_UP, None) is not None or (whole is not None and whole.grad is not None)
        for parameter, whole in _parameters_in(modules)
    )


def drop_unreduced_gradients(modules: Iterable[Module]) -> None:
    """Let go of these gradients: those of a backward that an error has ended."""
    for parameter, whole in _parameters_in(modules):
        if whole is not None:
            whole.grad = None
        if getattr(parameter, _ADDED_UP, None) is not None:
            setattr(parameter, _ADDED_UP, None)


def _parameters_in(modules: Iterable[Module]) -> Iterator[tuple[Any, Any]]:
    """Yield what is known of each sharded parameter, and the whole of it; None if it was never gathered."""
    for state in map(sharding_state, sharded_in(modules)):
        for group in getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]:
            for parameter in getattr(group, "fsdp_params", ()):
                yield parameter, getattr(parameter, "_unsharded_param", None)


def prepare_sharding(root: Module) -> None:
    """Make ready what the first forward pass of a sharded model would make ready."""
    ready = getattr(sharding_state(root), "_lazy_init", None)
    if ready is not None:
        ready()

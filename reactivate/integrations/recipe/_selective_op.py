"""torchtitan's selective mode "op": which calls are kept inside of the layers.

Kept are matrix products, attention and the like, but of the plain matrix products (a `Linear` without bias) every second
is recomputed. Out of that count, and recomputed, are products with a weight of certain shapes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch.nn import Linear, Module

from reactivate._types import Policy
from reactivate.errors import UsageError
from reactivate.integrations.recipe._layers import Layers, recompute
from reactivate.policies import compute_intensive, every_nth, exclude, first_match, save_ops, union
from reactivate.policies._select import matches

UNLESS_TOLD = ("moe.router.gate",)  # of torchtitan's mixture-of-experts models; others have none

_PRODUCTS = save_ops("linear", "mm")


def selective_op(layers: Layers, names: Sequence[str] | None = None, asked_by: str = "") -> Policy:
    """The policy: `layers` are regions, and what is kept inside of them.

    Args:
        names: parts of the paths of `Linear`s. These, and those of the same shape in the same layer, are recomputed.
            None, or torchtitan's own list: that list, where the model has such modules.
        asked_by: the field that `names` is from.

    Raises:
        UsageError: one of `names` occurs in no path, or in that of another module.
    """
    if names is not None and tuple(names) != UNLESS_TOLD:
        _check(layers, names, asked_by)
    recomputed = _recomputed(layers, UNLESS_TOLD if names is None else names)
    linears = {path: module for inside in map(_linears, layers.items()) for path, module in inside.items()}
    with_bias = [path for path, module in linears.items() if module.bias is not None and path not in recomputed]
    never = [save_ops("linear", within=_patterns(recomputed, linears))] if recomputed else []
    always = [save_ops("linear", within=_patterns(with_bias, linears))] if with_bias else []
    counted = exclude(_PRODUCTS, *never, *always) if never or always else _PRODUCTS
    saved = union(every_nth(2, counted), exclude(compute_intensive(), _PRODUCTS), *always)
    return first_match(saved, recompute(layers))


def _linears(layer: tuple[str, Module]) -> dict[str, Linear]:
    path, module = layer
    return {f"{path}.{name}": inner for name, inner in module.named_modules() if isinstance(inner, Linear)}


def _recomputed(layers: Layers, names: Sequence[str]) -> list[str]:
    """The paths of the `Linear`s that are never kept."""
    found: list[str] = []
    for inside in map(_linears, layers.items()):
        shapes = {module.weight.shape for path, module in inside.items() if any(name in path for name in names)}
        found += [path for path, module in inside.items() if module.weight.shape in shapes]
    return found


def _check(layers: Layers, names: Sequence[str], asked_by: str) -> None:
    """See to it that each of `names` occurs in the paths of `Linear`s, and in no others."""
    modules = {f"{path}.{name}": inner for path, layer in layers.items() for name, inner in layer.named_modules()}
    linears = [path for path, module in modules.items() if isinstance(module, Linear)]
    for name in names:
        found = [path for path in modules if name in path]
        others = [path.rstrip(".") for path in found if path not in linears]
        if others or not found or not name:
            fault = f"is in that of {others[0]}, which is none" if others else "is in none of these"
            raise UsageError(
                f"recipe: {asked_by} lists parts of the paths of Linear modules; {name!r} {fault}. These are: "
                f"{', '.join(_starred(linears)) or 'none'}."
            )


def _patterns(paths: Sequence[str], linears: Iterable[str]) -> tuple[str, ...]:
    """Patterns for `paths` and no other of `linears`: few if that is possible, each costs a look at every call."""
    few = _starred(paths)
    selected = {path for path in linears if any(matches(pattern, path) for pattern in few)}
    return tuple(few) if selected == set(paths) else tuple(paths)


def _starred(paths: Iterable[str]) -> list[str]:
    """`paths` with a star for every number, each once."""
    return list(
        dict.fromkeys(".".join("*" if name.isdecimal() else name for name in path.split(".")) for path in paths)
    )

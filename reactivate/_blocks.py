"""The blocks of a model: its repeated layers, whatever they are called."""

from __future__ import annotations

from collections import Counter

from torch.nn import Module, ModuleDict, ModuleList, Sequential

from reactivate._view import original_of

_CONTAINERS = (ModuleList, ModuleDict, Sequential)


def blocks_of(model: Module) -> dict[str, Module]:
    """{path: block}, in the order of `model.named_modules()`.

    Blocks are children of a `ModuleList`, `ModuleDict` or `Sequential` that share a class with another child of it, have
    parameters, and are made of modules themselves. Plain `Sequential`s share it if all that is in them does. What is inside
    of a block is none: the experts of a layer are a part of the layer.

    Example:
        >>> import torch
        >>> from reactivate._blocks import blocks_of
        >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16)
        >>> list(blocks_of(torch.nn.TransformerEncoder(layer, 2)))
        ['layers.0', 'layers.1']
    """
    found: dict[str, Module] = {}
    _collect(model, "", found, set())
    return found


def _collect(module: Module, path: str, found: dict[str, Module], seen: set[Module]) -> None:
    if module in seen:  # two names for one module
        return
    seen.add(module)
    blocks = _repeated(module) if isinstance(module, _CONTAINERS) else set()
    for name, child in module.named_children():
        place = f"{path}.{name}" if path else name
        if child in blocks:
            if child not in seen:
                found[place] = child
                seen.update(child.modules())
        else:
            _collect(child, place, found, seen)


def _repeated(container: Module) -> set[Module]:
    # A layer that is there several times (shared weights) is repeated, too; `children()` has it once.
    children = [child for child in container._modules.values() if child is not None and is_made_of_modules(child)]
    counts = Counter(map(_kind_of, children))
    return {child for child in children if counts[_kind_of(child)] > 1}


def _kind_of(module: Module) -> object:
    """Its class: of a plain `Sequential`, which may be anything, the classes of all that is in it."""
    kind = type(original_of(module))
    return tuple(type(original_of(inner)) for inner in module.modules()) if kind is Sequential else kind


def is_made_of_modules(module: Module) -> bool:
    """Whether a module that is called has modules inside, and parameters."""
    is_composite = any(True for _ in module.children()) and not isinstance(module, (ModuleList, ModuleDict))
    return is_composite and any(True for _ in module.parameters())

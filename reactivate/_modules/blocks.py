"""The blocks of a model: its repeated layers, whatever they are called."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator

from torch.nn import Module, ModuleDict, ModuleList, Sequential

from reactivate._modules.view import original_of

_CONTAINERS = (ModuleList, ModuleDict, Sequential)
_Rule = Callable[[Module, str], dict[str, Module]]
_NUMBERED = re.compile(r"(.*?)_?\d+")


def blocks_of(model: Module) -> dict[str, Module]:
    """Return {path: block}, in the order of `model.named_modules()`.

    Blocks are layers, modules with parameters that are made of modules themselves. Those of a `ModuleList` are blocks; those
    of a `Sequential` or `ModuleDict` are, if two of them share a class. A plain `Sequential` of layers in such a list is a
    stage, whose layers are those of the list. A layer that shares its class with no other one is a block, unless there
    are repeated layers inside of it. The outermost blocks count: the experts of a layer are a part of the layer.

    A model without such lists has its blocks under numbered names (`stage1`, `stage2`), or in any `Sequential`.

    Examples:
        >>> import torch
        >>> from reactivate._modules.blocks import blocks_of
        >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16)
        >>> list(blocks_of(torch.nn.TransformerEncoder(layer, 2)))
        ['layers.0', 'layers.1']
    """
    for layers_of in (_in_lists, _under_numbers, _in_sequentials):
        found: dict[str, Module] = {}
        _collect(model, "", found, set(), layers_of)
        if found:
            order = {id(module): number for number, module in enumerate(model.modules())}
            return dict(sorted(found.items(), key=lambda item: order[id(item[1])]))
    return {}


def siblings_of(model: Module, path: str) -> dict[str, Module]:
    """Return {path: module} of the modules in the list that the block at `path` is in, or beside it under its parent.

    Stages of a list (see `blocks_of`) are looked into.
    """
    parent = path.rpartition(".")[0]
    around = parent.rpartition(".")[0]
    if parent and _is_stage(model.get_submodule(parent)) and isinstance(model.get_submodule(around), _CONTAINERS):
        parent = around
    return dict(_layers_in(model.get_submodule(parent), parent))


def _collect(module: Module, path: str, found: dict[str, Module], seen: set[Module], layers_of: _Rule) -> None:
    if module in seen:  # two names for one module
        return
    seen.add(module)
    for place, child in layers_of(module, path).items():
        if child not in seen:
            found[place] = child
            seen.update(child.modules())
    for name, child in module.named_children():
        _collect(child, _joined(path, name), found, seen, layers_of)


def _in_lists(module: Module, path: str) -> dict[str, Module]:
    if not isinstance(module, _CONTAINERS):
        return {}
    # A layer that is there several times (shared weights) is repeated, too.
    layers = [(place, child) for place, child in _layers_in(module, path) if is_made_of_modules(child)]
    counts = Counter(_kind_of(child) for _, child in layers)
    if not isinstance(module, ModuleList) and not any(count > 1 for count in counts.values()):
        return {}
    return {place: child for place, child in layers if counts[_kind_of(child)] > 1 or not _has_repeated_layers(child)}


def _has_repeated_layers(module: Module) -> bool:
    lists = (inner for inner in module.modules() if isinstance(inner, _CONTAINERS))
    return any(count > 1 for inner in lists for count in Counter(map(_kind_of, _composites_in(inner))).values())


def _composites_in(module: Module) -> list[Module]:
    return [child for child in module._modules.values() if child is not None and is_made_of_modules(child)]


def _under_numbers(module: Module, path: str) -> dict[str, Module]:
    groups: dict[object, dict[str, Module]] = {}
    for name, child in module.named_children():
        numbered = _NUMBERED.fullmatch(name)
        if numbered is not None and is_made_of_modules(child) and not isinstance(module, _CONTAINERS):
            groups.setdefault((numbered[1], type(original_of(child))), {})[_joined(path, name)] = child
    return {place: child for group in groups.values() if len(group) > 1 for place, child in group.items()}


def _in_sequentials(module: Module, path: str) -> dict[str, Module]:
    if not isinstance(module, Sequential):
        return {}
    return {place: child for place, child in _layers_in(module, path) if is_made_of_modules(child)}


def _layers_in(module: Module, path: str) -> Iterator[tuple[str, Module]]:
    for name, child in module._modules.items():
        if child is not None:
            place = _joined(path, name)
            if isinstance(module, _CONTAINERS) and _is_stage(child):
                yield from _layers_in(child, place)
            else:
                yield place, child


def _is_stage(module: Module) -> bool:
    """Return whether a module is a plain `Sequential` of layers, and of nothing else."""
    return type(module) is Sequential and len(module) > 0 and all(map(is_made_of_modules, module))


def _kind_of(module: Module) -> object:
    """Return the class of a module: of a plain `Sequential`, which may be anything, the classes of all that is in it."""
    kind = type(original_of(module))
    return tuple(type(original_of(inner)) for inner in module.modules()) if kind is Sequential else kind


def is_made_of_modules(module: Module) -> bool:
    """Return whether a module that is called has modules inside, and parameters."""
    is_composite = any(True for _ in module.children()) and not isinstance(module, (ModuleList, ModuleDict))
    return is_composite and any(True for _ in module.parameters())


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name

"""The units of a plan: the blocks of a model, and what else of it is made of modules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from torch.nn import Module, ModuleDict, ModuleList

from reactivate._modules.blocks import blocks_of, is_made_of_modules

_LISTS = (ModuleList, ModuleDict)  # they have children and are not called


def units_of(model: Module) -> dict[str, Module]:
    """{path: module}, none inside of another: the blocks, and the largest modules of modules without a block inside.

    A model without either has the repeated modules of its lists as units, recurrent layers say; or is one unit itself, with
    the path "".

    Example:
        >>> import torch
        >>> from reactivate.planner.units import units_of
        >>> conv = lambda: torch.nn.Sequential(torch.nn.Conv2d(3, 3, 1), torch.nn.ReLU())
        >>> list(units_of(torch.nn.ModuleDict({"down": conv(), "up": torch.nn.ModuleList([conv(), conv()])})))
        ['down', 'up.0', 'up.1']
    """
    blocks = set(map(id, blocks_of(model).values()))
    found = dict(_collect(model, "", blocks, set()))
    while len(found) == 1 and not blocks:  # a wrapper: what it wraps may be more than one
        ((path, only),) = found.items()
        inside = dict(_collect(only, path, blocks, set()))
        if not inside:
            break
        found = inside
    return found or _repeated_leaves(model) or {"": model}


def _repeated_leaves(model: Module) -> dict[str, Module]:
    """The modules in lists that repeat and have no modules inside: recurrent layers."""
    found: dict[str, Module] = {}
    for path, module in model.named_modules():
        if isinstance(module, ModuleList):
            leaves = {f"{path}.{name}" if path else name: child for name, child in module.named_children()}
            alike = Counter(type(child) for child in leaves.values())
            found |= {place: child for place, child in leaves.items() if alike[type(child)] > 1 and _is_layer(child)}
    return found


def _is_layer(module: Module) -> bool:
    return not any(True for _ in module.children()) and any(True for _ in module.parameters())


def parts_of(unit: Module) -> dict[str, Module]:
    """{path: module} of what a unit is made of and which is made of modules itself: attention, MLP."""
    return dict(_collect(unit, "", set(), set()))


def _collect(module: Module, path: str, blocks: set[int], seen: set[int]) -> Iterator[tuple[str, Module]]:
    for name, child in module.named_children():
        place = f"{path}.{name}" if path else name
        if id(child) in seen:
            continue
        seen.add(id(child))
        if id(child) in blocks:
            yield place, child
        elif isinstance(child, _LISTS) or any(id(inner) in blocks for inner in child.modules()):
            yield from _collect(child, place, blocks, seen)
        elif is_made_of_modules(child):
            yield place, child

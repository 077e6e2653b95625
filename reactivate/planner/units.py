"""The units of a plan: the blocks of a model, what else of it is made of modules, and its recurrent layers; and their
digests.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping

from torch.nn import Module, ModuleDict, ModuleList, RNNBase, RNNCellBase
from torch.nn.parallel import DistributedDataParallel

from reactivate._modules.blocks import blocks_of, is_made_of_modules
from reactivate._modules.spans import SequentialSpan, kind_of_span
from reactivate._torch.modules import sharded_class

_LISTS = (ModuleList, ModuleDict)  # they have children and are not called


def find_units(model: Module) -> dict[str, Module]:
    """{path: module}, none inside of another: the blocks, and the largest modules of modules without a block inside.

    Recurrent layers (LSTM, GRU, RNN and their cells) are units wherever they are. A model without any of these has as units
    the layers of its own classes that repeat and have no modules inside; or is one unit itself, with the path "".

    Examples:
        >>> import torch
        >>> from reactivate.planner.units import find_units
        >>> conv = lambda: torch.nn.Sequential(torch.nn.Conv2d(3, 3, 1), torch.nn.ReLU())
        >>> list(find_units(torch.nn.ModuleDict({"down": conv(), "up": torch.nn.ModuleList([conv(), conv()])})))
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
    """The layers without modules inside whose class repeats, wherever they are: in lists, dicts, attributes."""
    leaves = {path: module for path, module in model.named_modules() if path and _is_layer(module)}
    alike = Counter(map(type, leaves.values()))
    return {path: module for path, module in leaves.items() if alike[type(module)] > 1}


def _is_layer(module: Module) -> bool:
    """Return whether a module has parameters, no modules inside, and more than one op: each layer of torch's own is one."""
    is_op = type(module).__module__.startswith("torch.nn.modules.")
    return not is_op and not any(True for _ in module.children()) and any(True for _ in module.parameters())


def find_parts(unit: Module) -> dict[str, Module]:
    """{path: module} of what a unit is made of and which is made of modules itself, or recurrent: attention, MLP."""
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
        elif is_made_of_modules(child) or isinstance(child, (RNNBase, RNNCellBase)):
            yield place, child


# -- digests ----------------------------------------------------------------------------------------------------------


def parameter_digest(module: Module) -> str:
    """Return a digest of a block's parameters: of names, shapes and dtypes, not values."""
    facts = [(name, tuple(item.shape), str(item.dtype)) for name, item in module.named_parameters()]
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


def module_class_name(module: Module) -> str:
    """Return the name of a module's class, of a sharded one that of the class that `fully_shard` made another of."""
    if isinstance(module, SequentialSpan):
        return kind_of_span(len(module))
    sharded = sharded_class()
    if not isinstance(module, sharded):
        return type(module).__name__
    return next(kind.__name__ for kind in type(module).__mro__ if not issubclass(kind, sharded))


def unit_digests(units: Mapping[str, Module]) -> list[tuple[str, str, str]]:
    """Return path, class and digest of each unit."""
    return [(path, module_class_name(unit), parameter_digest(unit)) for path, unit in units.items()]


def bucket_bytes(model: Module) -> int:
    """Return the bytes of the buckets of `DistributedDataParallel` that are no gradients as well."""
    wrappers = [item for item in model.modules() if isinstance(item, DistributedDataParallel)]
    return sum(
        parameter.nbytes
        for wrapper in wrappers
        if not wrapper.gradient_as_bucket_view
        for parameter in wrapper.parameters()
        if parameter.requires_grad
    )

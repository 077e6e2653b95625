"""The class of a block and a digest of its parameters, by which a plan knows it again."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel

from reactivate._torch.modules import sharded_class


def digest_of(module: Module) -> str:
    """Return a digest of a block's parameters: of names, shapes and dtypes, not values."""
    facts = [(name, tuple(item.shape), str(item.dtype)) for name, item in module.named_parameters()]
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


def class_name_of(module: Module) -> str:
    """Return the name of a module's class, of a sharded one that of the class that `fully_shard` made another of."""
    sharded = sharded_class()
    if not isinstance(module, sharded):
        return type(module).__name__
    return next(kind.__name__ for kind in type(module).__mro__ if not issubclass(kind, sharded))


def digests_of(units: Mapping[str, Module]) -> list[tuple[str, str, str]]:
    """Return path, class and digest of each unit."""
    return [(path, class_name_of(unit), digest_of(unit)) for path, unit in units.items()]


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

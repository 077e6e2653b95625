"""The class of a block and a digest of its parameters, by which a plan knows it again."""

from __future__ import annotations

import hashlib
import sys
from typing import Any

from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel


def digest_of(module: Module) -> str:
    """Return a digest of a block's parameters: of names, shapes and dtypes, not values."""
    facts = [(name, tuple(item.shape), str(item.dtype)) for name, item in module.named_parameters()]
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


def class_name_of(module: Module) -> str:
    """Return the name of a module's class, of a sharded one that of the class that `fully_shard` made another of."""
    sharded = _sharded_class()
    if not isinstance(module, sharded):
        return type(module).__name__
    return next(kind.__name__ for kind in type(module).__mro__ if not issubclass(kind, sharded))


def is_sharded(model: Module) -> bool:
    """Return whether `fully_shard` has sharded parameters of a model."""
    sharded = _sharded_class()
    return any(isinstance(module, sharded) for module in model.modules())


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


def _sharded_class() -> Any:
    """Return the class of sharded modules; no class where nobody has imported the library."""
    library = sys.modules.get("torch.distributed.fsdp")
    return () if library is None else library.FSDPModule

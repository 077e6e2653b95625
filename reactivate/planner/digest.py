"""A digest of a block's parameters, by which a plan knows it again."""

from __future__ import annotations

import hashlib

from torch.nn import Module


def digest_of(module: Module) -> str:
    """Return a digest of a block's parameters: of names, shapes and dtypes, not values."""
    facts = [(name, tuple(item.shape), str(item.dtype)) for name, item in module.named_parameters()]
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]

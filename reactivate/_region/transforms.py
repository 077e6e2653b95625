"""Regions under the transforms of torch.func."""

from __future__ import annotations

import warnings

from reactivate._region import errors_text
from reactivate._torch.modes import name_of_transform
from reactivate.errors import UnsupportedError


def is_plain_under_transform() -> bool:
    """Return whether the call is the plain one: under transforms of `torch.func` that need nothing to be saved."""
    transform = name_of_transform()
    if transform in ("torch.func.vmap", "torch.func.jvp"):
        warnings.warn(errors_text.keeps_activations_under(transform), stacklevel=4)
        return True
    if transform is not None:
        raise UnsupportedError(
            f"A checkpointed region was called under {transform}, which saved-tensor hooks do not work with. Call the "
            "function without checkpointing there, or put the checkpoint around the transformed function."
        )
    return False

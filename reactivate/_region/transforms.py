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


def refuse_transform_inside(error: BaseException) -> None:
    """Raise our own error where torch says that a transform inside of a region does not work with saved-tensor hooks."""
    if isinstance(error, RuntimeError) and "torch.func.{grad" in str(error):
        raise UnsupportedError(
            "A checkpointed region calls torch.func.grad, vjp, jacrev or hessian, which torch refuses where saved-tensor "
            "hooks are active, those of a region among them. Call torch.autograd.grad(..., create_graph=True) there, or call "
            "the transformed function outside of the region."
        ) from error

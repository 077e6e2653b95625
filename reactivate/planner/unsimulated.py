"""Errors for steps that can neither be simulated, since they need values, nor run to give these; and what such steps lack."""

from __future__ import annotations

import torch

from reactivate._region.accounts import in_words
from reactivate.errors import UnsupportedError, UsageError

NO_STORAGES = (
    "plan(storages=...): this step depends on values that it computes, so what a storage does in it cannot be proved: it is "
    "rehearsed without values. The plan is made without storages."
)


def without_values(reason: Exception) -> UsageError:
    """Return the error for a model that has none.

    Args:
        reason: what fake tensors have raised.
    """
    return UsageError(
        f"{_failed(reason)}: it needs values, as the counts of a router do, and this model has none. Plan it where it has "
        "values (device='H100-SXM' plans it there for a device that is elsewhere), or plan the part of it in front of that, "
        "or behind it."
    )


def among_ranks(reason: Exception) -> UnsupportedError:
    """Return the error for a model whose ranks wait for each other in a real step.

    Args:
        reason: what fake tensors have raised.
    """
    return UnsupportedError(
        f"{_failed(reason)}, so one step has to run, and in that ranks would wait for each other's collectives. With group=, "
        "for one batch and the device that is here, they run it together, if all of them need it. Or plan the model on one "
        "rank, and shard it then: the plan can be applied before or after that."
    )


def too_large(reason: Exception, free_bytes: int, device: torch.device) -> UnsupportedError:
    """Return the error for a step that has to run and does not fit.

    Args:
        reason: what fake tensors have raised.
        free_bytes: the free memory.
        device: where that is.
    """
    return UnsupportedError(
        f"{_failed(reason)}, so steps have to run, and one needs more than the "
        f"{in_words(free_bytes)} that are free on {device}. Plan it with a smaller batch, or where more memory is free: the "
        "plan can be applied here."
    )


def _failed(reason: Exception) -> str:
    first_line = str(reason).partition("\n")[0]
    return f"plan: the step does something that cannot be simulated ({type(reason).__name__}: {first_line})"

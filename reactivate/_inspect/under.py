"""A model or a function under a policy, for as long as it is looked at."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.nn import Module

from reactivate._checkpoint import checkpoint
from reactivate._model.apply import apply, paused
from reactivate._types import Policy


@contextmanager
def under(policy: Policy, model: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """Put a policy in the place of the one that is applied to a module; make a function one region with it."""
    if isinstance(model, Module):
        with paused(model), apply(model, policy):
            yield model
    else:
        yield checkpoint(model, policy=policy)

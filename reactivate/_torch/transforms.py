"""Transforms of `torch.func` around a call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from reactivate._torch.ways import fastest

# The innermost torch.func transform around the call, or None.
current_transform: Callable[[], Any] = fastest(
    "detecting torch.func transforms around a call",
    "torch._C._functorch.peek_interpreter_stack",
    probe=lambda ask: ask() is ask(),
    without=lambda: None,
    lost="regions under torch.func raise torch's own error about hooks",
)
_TRANSFORMS = {
    "Grad": "torch.func.grad or vjp",
    "Jvp": "torch.func.jvp",
    "Vmap": "torch.func.vmap",
}


def name_of_transform() -> str | None:
    """Return the name of the innermost transform; None for functionalization, which is not the user's."""
    return _TRANSFORMS.get(current_transform().key().name)

"""The ways to compare: ways to checkpoint a block on XLA, and none at all."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torchs

import reactivate
from reactivate.policies import every_nth, save_ops

Way = Callable[[nn.Module], Callable[[Tensor], Tensor]]

NONE = "none"
TORCH = "torch"
CONTEXT = "torch, context_fn"
TORCH_XLA = "torch_xla"
OURS = "reactivate"
ALTERNATE = "every 2nd linear saved"
LINEARS = "every linear saved"


def torchs_own(block: nn.Module) -> Callable[[Tensor], Tensor]:
    import_module("reactivate.dropin.xla")  # torch's function asks for a `torch.xla`, which is registered there
    return lambda x: torchs(block, x, use_reentrant=False)


def torchs_fenced(block: nn.Module) -> Callable[[Tensor], Tensor]:
    from reactivate.dropin.xla import context_fn

    return lambda x: torchs(block, x, use_reentrant=False, context_fn=context_fn)


def torch_xlas_own(block: nn.Module) -> Callable[[Tensor], Tensor]:
    from torch_xla.utils.checkpoint import checkpoint

    return lambda x: checkpoint(block.forward, x)  # a bound method: only of one it finds the parameters


WAYS: dict[str, Way] = {
    NONE: lambda block: block,
    TORCH: torchs_own,
    CONTEXT: torchs_fenced,
    TORCH_XLA: torch_xlas_own,
    OURS: reactivate.checkpoint,
    ALTERNATE: lambda block: reactivate.checkpoint(block, policy=every_nth(2, save_ops("linear"))),
    LINEARS: lambda block: reactivate.checkpoint(block, policy=save_ops("linear")),
}

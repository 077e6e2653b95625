"""Steps of fused optimizers, which write to parameters without a new version.

Torch calls a hook after each step of any optimizer; from the first region on, it notes here which parameters a fused one
stepped. Other code sees no difference: the parameters and their versions stay as the optimizer left them.
"""

from __future__ import annotations

import functools
from typing import Any
from weakref import ref

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

_stepped: dict[int, tuple[ref[Tensor], int]] = {}  # by the id of the parameter: its last step
fused_steps = [0]
"""How many there were; counted from the first call of `steps_so_far` on."""


def steps_so_far() -> int:
    """Return how many fused steps there were."""
    _listen()
    return fused_steps[0]


def last_step_of(tensor: Tensor) -> int:
    """Return the number of the last fused step of `tensor`, 0 if there was none."""
    found = _stepped.get(id(tensor)) if _stepped else None
    return found[1] if found is not None and found[0]() is tensor else 0


@functools.cache
def _listen() -> None:
    register_optimizer_step_post_hook(_note)


def _note(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    groups = [group for group in optimizer.param_groups if group.get("fused")]
    if groups:
        fused_steps[0] += 1
        for group in groups:
            for tensor in group["params"]:
                if tensor.grad is not None:  # the others are left as they are
                    key = id(tensor)
                    _stepped[key] = ref(tensor, functools.partial(_stepped.pop, key)), fused_steps[0]

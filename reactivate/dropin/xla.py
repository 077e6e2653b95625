"""`torch_xla.utils.checkpoint` on this engine, and a context for `torch.utils.checkpoint` on XLA devices.

On XLA forward, recomputation and backward are one graph, in which the compiler computes once what it finds twice: it
undoes a checkpoint. `reactivate.checkpoint` prevents that with nothing to set. For code that stays with torch's own
function there is `context_fn`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from reactivate._backends import backends
from reactivate._xla.aliases import Aliases
from reactivate._xla.fence import fences
from reactivate.dropin import torch as dropin

__all__ = ["checkpoint", "context_fn"]


def context_fn() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """For `torch.utils.checkpoint.checkpoint(fn, x, use_reentrant=False, context_fn=context_fn)`.

    In a recomputation, whatever the function reads is read behind the device's fence, so that the compiler takes the
    recomputation for something else than the forward pass. When it runs is up to the compiler: torch's function does not
    say which gradients it waits for, so that it may be scheduled before the backward, and then saves nothing.
    `reactivate.checkpoint` says it. On a device without a fence the context changes nothing.

    Returns:
        A context for the forward pass, which does nothing, and one for recomputations.

    Examples:
        >>> import torch, reactivate
        >>> from torch.utils.checkpoint import checkpoint
        >>> x = torch.ones(2, requires_grad=True)
        >>> checkpoint(torch.sin, x, use_reentrant=False, context_fn=reactivate.dropin.xla.context_fn).sum().backward()
    """
    return nullcontext(), Aliases(fences())


def checkpoint(function: Callable[..., Any], *args: Any, use_reentrant: bool = True, **kwargs: Any) -> Any:
    """`torch_xla.utils.checkpoint.checkpoint` on this engine: the same arguments and meanings.

    Keyword arguments for the function, `torch.autograd.grad`, inputs that need no gradient and functions that are no
    methods of a module work as well, and `use_reentrant=False`, which torch_xla refuses, is the same thing here.

    Args:
        function: what to checkpoint; called with `args` and what is left of `kwargs`.
        use_reentrant: without meaning here.
        kwargs: `preserve_rng_state=False` leaves random numbers out; everything else goes to `function`.

    Raises:
        ReactivateError: see `reactivate.checkpoint`.

    Examples:
        >>> import torch, reactivate
        >>> x = torch.ones(2, requires_grad=True)
        >>> reactivate.dropin.xla.checkpoint(torch.sin, x).sum().backward()
    """
    return dropin.checkpoint(function, *args, use_reentrant=use_reentrant, **kwargs)


backends()  # torch's own function fails on XLA without a device module, which comes with the backend

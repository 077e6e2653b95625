"""The question of user code whether it runs in a recomputation."""

from __future__ import annotations

from reactivate._passes.current import is_recomputed
from reactivate._passes.logs import current_log
from reactivate._passes.oplog import OpLog
from reactivate._torch.modes import dispatch_modes, is_dispatch_mode_active

_MAY_OMIT = "the region has asked is_recomputing() before it, so that its recomputation may leave calls out"


def is_recomputing() -> bool:
    """Return whether the calling code runs in a recomputation: exactly then, on this thread (Rule 19).

    For code with side effects that no guard knows, which would otherwise happen twice: metrics, logging, counters. Saved
    calls are matched by their order, so under a policy those that follow in this forward are computed again.

    Examples:
        >>> import torch, reactivate
        >>> seen = []
        >>> def f(x):
        ...     if not reactivate.is_recomputing():
        ...         seen.append(x.shape)
        ...     return x.sin().cos()
        >>> reactivate.checkpoint(f)(torch.ones(2, requires_grad=True)).sum().backward()
        >>> len(seen)
        1
    """
    if is_recomputed():
        return True
    if (log := current_log()) is not None:
        log.rerun_from_here(_MAY_OMIT)
    if is_dispatch_mode_active():
        for mode in dispatch_modes():
            if isinstance(mode, OpLog):
                mode.may_omit = True
    return False

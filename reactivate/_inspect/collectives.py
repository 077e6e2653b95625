"""Collectives in a simulated step: nothing is sent, and their results have the sizes that they have anyway.

`torch.distributed` writes into tensors that the caller has made, and returns a handle to wait with. No rank waits for another
one in a simulated step, so that each simulates by itself, and as often as it needs to.
"""

from __future__ import annotations

from typing import Any

from reactivate._torch.collectives import finished_work

_WRITING = "c10d"
_FUNCTIONAL = frozenset({"_c10d_functional", "_c10d_functional_autograd"})


def is_collective(op: Any) -> bool:
    """Return whether an op talks to other ranks."""
    return op.namespace == _WRITING or op.namespace in _FUNCTIONAL


def simulated_collective(op: Any, args: Any, kwargs: Any) -> Any:
    """Return what a collective would, without running it."""
    if op.namespace in _FUNCTIONAL:  # torch says how large the results are
        return op(*args, **kwargs)
    work = finished_work()
    return work if len(op._schema.returns) == 1 else (args[0], work)

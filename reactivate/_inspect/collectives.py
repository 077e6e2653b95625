"""Collectives in a simulated step: nothing is sent, and their results have the sizes that they have anyway.

`torch.distributed` writes into tensors that the caller has made, and returns a handle to wait with. No rank waits for another
one in a simulated step, so that each simulates by itself, and as often as it needs to.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from reactivate._torch.ops import finished_work, finished_work_with, flatten, unflatten

_WRITING = "c10d"
_IN_PLACE = ("::allreduce_", "::allreduce_coalesced_", "::broadcast_", "::reduce_", "::barrier")
_FUNCTIONAL = frozenset({"_c10d_functional", "_c10d_functional_autograd"})


def is_collective(op: Any) -> bool:
    """Return whether an op talks to other ranks."""
    return op.namespace == _WRITING or op.namespace in _FUNCTIONAL


def simulated_collective(op: Any, args: Any, kwargs: Any) -> Any:
    """Return what a collective would, without running it."""
    if op is torch.ops._c10d_functional.wait_tensor.default:
        return args[0]  # as on a device; torch describes it as a copy
    if op.namespace in _FUNCTIONAL:  # torch says how large the results are
        return op(*args, **kwargs)
    return _as_returned(op, args, finished_work())


def skipped_collective(op: Any, args: Any, kwargs: Any) -> Any:
    """Return what a collective would, for real tensors, without running it: zeros for what comes from other ranks."""
    if op.namespace == _WRITING:
        tensors = _tensors_in(args[0])
        if not op._schema.name.endswith(_IN_PLACE):
            for tensor in tensors:
                tensor.zero_()
        return _as_returned(op, args, finished_work_with(tensors))
    leaves, structure = flatten((args, kwargs))
    if op._schema.is_mutable:
        own = kwargs.get("out", args[0])
        return own.zero_() if "out" in kwargs else own
    meta = [leaf.to("meta") if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    given = next(leaf for leaf in leaves if isinstance(leaf, Tensor))
    described = op(*unflatten(meta, structure)[0], **unflatten(meta, structure)[1])
    results, structure = flatten(described)
    return unflatten([torch.zeros_like(item, device=given.device) for item in results], structure)


def _as_returned(op: Any, args: Any, work: Any) -> Any:
    return work if len(op._schema.returns) == 1 else (args[0], work)


def _tensors_in(value: Any) -> list[Tensor]:
    return [leaf for leaf in flatten(value)[0] if isinstance(leaf, Tensor)]

"""Regions inside of a function that AOTAutograd traces without dynamo: `scan` and `scan_layers` of torch_xla.

The partitioner decides what the backward graph recomputes, by the tags of the nodes. A region tags the nodes that are made
while it runs, as torch.compile tags those of its operator, and saves no tensor itself.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch.fx.traceback import get_current_meta, preserve_node_meta
from torch.utils.checkpoint import CheckpointPolicy

from reactivate._passes.observing import are_regions_off
from reactivate._region.options import Options
from reactivate._snapshot.kinds import asked_for
from reactivate._torch.dynamo import DispatchMode
from reactivate._torch.ops import flatten
from reactivate.errors import UnsupportedError

_ACTION, _REGION = "recompute", "ac_graph_id"  # torch's names: its partitioner reads them

_numbers = itertools.count(1)


def run_tagged(fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any], options: Options, contexts: Any) -> Any:
    """`fn(*args, **kwargs)`, every node of which the partitioner is told to recompute.

    Raises:
        UnsupportedError: there are contexts, which torch.compile would enter around it, and of which nodes tell nothing.
    """
    if not torch.is_grad_enabled() or are_regions_off():  # Rule 3
        return fn(*args, **kwargs)
    if contexts is not None:
        name = options.name or asked_for(fn, "__name__") or type(fn).__name__
        raise UnsupportedError(
            f"The region {name!r} has a policy or a pair of contexts, and AOTAutograd traces it without "
            "dynamo (torch_xla's scan and scan_layers): its graph does not tell which calls the ops come from. Leave the "
            "policy out there, or put regions around what should be recomputed alone."
        )
    if get_current_meta().get(_ACTION) is not None:  # a region around this one
        return fn(*args, **kwargs)
    with preserve_node_meta():
        get_current_meta()[_REGION] = next(_numbers)
        with _Tags():
            return fn(*args, **kwargs)


class _Tags(DispatchMode):
    """Tells the tracer what becomes of the node that it makes next."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        get_current_meta()[_ACTION] = _action_for(func, args, kwargs)
        return func(*args, **(kwargs or {}))


def _action_for(op: Any, args: Any, kwargs: Any) -> CheckpointPolicy:
    """Return what becomes of an op in a region that has no policy: all but XLA's random numbers are recomputed.

    The seed of XLA is no part of a graph, so that its numbers are not drawn again.
    """
    is_random = torch.Tag.nondeterministic_seeded in getattr(op, "tags", ())
    if is_random and any(_is_of_xla(leaf) for leaf in flatten((args, kwargs))[0]):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def _is_of_xla(leaf: Any) -> bool:
    device = leaf.device if isinstance(leaf, torch.Tensor) else leaf
    return isinstance(device, torch.device) and device.type == "xla"

"""Edges of the graph: which of them the backward that is running takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from reactivate._torch.autograd import current_node
from reactivate._torch.ways import fastest


def _is_for_backwards(ask: Any) -> bool:
    node = torch.ones(1, device="cpu", requires_grad=True).exp().grad_fn
    try:
        ask(node)
    except RuntimeError:  # as it should: there is no backward now, and to run one would start threads
        return True
    return False


# Whether the backward that is running will run a node. It raises for a leaf whose gradient is asked for.
_will_run: Callable[[Any], bool] = fastest(
    "detecting what a running backward will compute",
    "torch._C._will_engine_execute_node",
    probe=_is_for_backwards,
    without=lambda node: False,
    lost="under `shared_recompute` recomputed tensors stay until autograd frees the graph",
)


def is_left_for_another_backward() -> bool:
    """Return whether the node that is running on this thread has an edge that its backward does not take.

    Only another backward can compute the gradient for such an edge, and it reads what the node saved, maybe for a second
    time. Where torch does not say which edges are taken, each node with an edge counts.
    """
    node = current_node()
    return node is not None and not all(_is_taken(following) for following, _ in node.next_functions)


def _is_taken(node: Any) -> bool:
    if node is None:
        return True
    try:
        return _will_run(node)
    except RuntimeError:
        return True

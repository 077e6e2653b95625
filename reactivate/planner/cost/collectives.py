"""The time of a collective, from what it sends and the links between the devices of its ranks.

Each rank of a ring sends and receives the whole of what is gathered or scattered but its own part, and twice that to reduce
it for all: the "bus bandwidth" of nccl-tests (https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md). Inside
of a node a ring goes over the links between its devices. Between nodes it goes over the network, of which each device has
its own card: ranks of one node share what their cards carry together. Rank r is device r % 8 of node r // 8 where a node
has 8.

It does not see algorithms that send less (those in switches), congestion, or ranks that come late.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from reactivate._torch.ops import tensors_at_op
from reactivate.planner.cost.devices import DeviceSpec
from reactivate.planner.cost.links import Link

_SENT_TWICE = ("allreduce", "all_reduce")
_SENT_IN_PARTS = ("gather", "scatter", "to_all", "toall")


def seconds_of(op: Any, args: Sequence[Any], result: Any, ranks: Sequence[int], device: DeviceSpec) -> float:
    """Return the seconds of a collective; 0 for one that sends no tensor, or nothing to another rank.

    Args:
        op, args, result: a call as `__torch_dispatch__` sees it, and its result, on real tensors or fake ones.
        ranks: those that take part.
    """
    nbytes = max(map(_size_bytes, (*args, result)), default=0)
    if len(ranks) < 2 or not nbytes:
        return 0.0
    others = (len(ranks) - 1) / len(ranks)
    name = str(op._schema.name)
    if any(word in name for word in _SENT_TWICE):
        nbytes = round(2 * others * nbytes)
    elif any(word in name for word in _SENT_IN_PARTS):
        nbytes = round(others * nbytes)
    link = link_between(ranks, device)
    return link.out_seconds(nbytes) + link.tensor_seconds


def link_between(ranks: Sequence[int], device: DeviceSpec) -> Link:
    """Return the way from one rank of a ring to the next.

    Examples:
        >>> from reactivate.planner.cost.collectives import link_between
        >>> from reactivate.planner.cost.devices import find
        >>> device = find("H100-SXM")
        >>> inside, between = link_between(range(8), device), link_between(range(0, 64, 8), device)
        >>> round(inside.out_bytes_per_second / between.out_bytes_per_second)
        9
    """
    here, network = device.link_to_peer, device.links.get("network")
    in_node = Counter(rank // device.node_devices for rank in ranks)
    if len(in_node) == 1 or network is None:
        return here
    cards = min(in_node.values())
    rate = min(here.out_bytes_per_second, cards * network.out_bytes_per_second)
    return Link(rate, rate, network.tensor_seconds)


def _size_bytes(value: Any) -> int:
    return sum(tensor.nbytes for tensor in tensors_at_op(value))

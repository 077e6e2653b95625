"""The cases of `test_rng_streams` that run on several ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import Cases, case
from torch import Tensor

import reactivate
from reactivate.guards import RngTracker, tensor_parallel_seeds

CASES: Cases = {}
SEED = 1234


def drawn(wrap: Callable[..., Any]) -> list[Tensor]:
    """Train with dropout that ranks share, and dropout of each rank, and draw from each stream afterwards."""
    torch.manual_seed(SEED)
    tracker = RngTracker()
    for name, seed in tensor_parallel_seeds(SEED, dist.get_rank()).items():
        tracker.add(name, seed)

    def block(x: Tensor) -> Tensor:
        h = F.dropout(x.sin(), 0.5)
        with tracker.fork():
            h = F.dropout(h.exp(), 0.5)
        return F.dropout(h.cos(), 0.5)

    x = torch.ones(64, requires_grad=True)
    (wrap(block)(wrap(block)(x)) * 2).sum().backward()
    assert x.grad is not None
    found = [x.grad, torch.rand(4)]
    for name in ("data-parallel-rng", "model-parallel-rng", "expert-parallel-rng"):
        with tracker.fork(name):
            found.append(torch.rand(4))
    return found


def of_rank_0(tensor: Tensor) -> Tensor:
    found = tensor.clone()
    dist.broadcast(found, 0)
    return found


@case(CASES, 1, 2)
def the_same_seed_on_ranks() -> None:
    """Shared streams draw the same everywhere, those of a rank what its seed says; bitwise the plain run."""
    plain, ours = drawn(lambda fn: fn), drawn(reactivate.checkpoint)
    assert all(map(torch.equal, plain, ours))
    rank = dist.get_rank()
    _, default, data, model, expert = ours
    assert torch.equal(of_rank_0(default), default) and torch.equal(of_rank_0(data), data)
    assert torch.equal(data, torch.rand(4, generator=torch.Generator().manual_seed(SEED)))
    of_rank = torch.Generator().manual_seed(SEED + 2718 + rank)
    for _ in range(2):  # the dropout of two blocks
        torch.empty(64).bernoulli_(0.5, generator=of_rank)
    assert torch.equal(model, torch.rand(4, generator=of_rank))
    assert torch.equal(expert, torch.rand(4, generator=torch.Generator().manual_seed(SEED + 1024 + rank)))
    for tensor in (model, expert):
        assert torch.equal(of_rank_0(tensor), tensor) == (rank == 0)

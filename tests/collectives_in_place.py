"""Collectives that write to a tensor in place, by every way in which a program can call one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

# torch 2.13 has other names for them.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Boxed(TorchDispatchMode):
    """Notes the arguments of an op beside its tensors, as only torch itself makes them."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.op, self.args = func, args
        return func(*args, **(kwargs or {}))


def op(collective: Callable[[Tensor], Any], tensor: Tensor) -> None:
    """Call the op that a collective calls, from Python."""
    with Boxed() as boxed:
        collective(torch.zeros_like(tensor))
    written = [tensor] if isinstance(boxed.args[0], list) else tensor
    boxed.op(written, *boxed.args[1:])[-1].wait()


def halves(tensor: Tensor) -> list[Tensor]:
    return list(tensor.chunk(2))


def exchanged(tensor: Tensor, *, waits: bool) -> None:
    """Send one half to the next rank, and get that of the one before."""
    size, rank = dist.get_world_size(), dist.get_rank()
    mine, others = halves(tensor)
    receive = functools.partial(dist.irecv, others, (rank - 1) % size)
    if waits:
        work = receive()
        dist.send(mine.clone(), (rank + 1) % size)
        work.wait()  # type: ignore[union-attr]
        return
    works = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, mine.clone(), (rank + 1) % size), dist.P2POp(dist.irecv, others, (rank - 1) % size)]
    )
    for work in works:
        work.wait()


def received(tensor: Tensor) -> None:
    if dist.get_rank():
        dist.recv(tensor, 0)
    else:
        for rank in range(1, dist.get_world_size()):
            dist.send(tensor, rank)
    if not dist.get_rank():
        dist.all_reduce(tensor, group=ALONE[0])


ALONE: list[Any] = []  # a group of each rank alone


def gathered_on_one(tensor: Tensor) -> None:
    dist.gather(halves(tensor)[0].clone(), halves(tensor) if dist.get_rank() == 0 else None)


def coalesced(tensor: Tensor) -> None:
    with dist._coalescing_manager():
        for half in halves(tensor):
            dist.all_reduce(half)


def with_handle(tensor: Tensor) -> None:
    dist.all_reduce(tensor, async_op=True).wait()  # type: ignore[union-attr]


_name = lambda: dist.group.WORLD.group_name  # type: ignore[union-attr]  # noqa: E731
_functional = torch.ops._c10d_functional
IN_PLACE: dict[str, Callable[[Tensor], Any]] = {
    "all_reduce": dist.all_reduce,
    "all_reduce with a handle": with_handle,
    "all_reduce in a coalescing manager": coalesced,
    "broadcast": lambda x: dist.broadcast(x, 0),
    "reduce": lambda x: dist.reduce(x, 0),
    "all_gather": lambda x: dist.all_gather(halves(x), halves(x)[0].clone()),
    "all_gather_into_tensor": lambda x: all_gather(x, halves(x)[0].clone()),
    "gather": gathered_on_one,
    "scatter": lambda x: dist.scatter(x, [x.cos(), x.sin()] if dist.get_rank() == 0 else None),
    "reduce_scatter": lambda x: dist.reduce_scatter(x, [x.cos(), x.sin()]),
    "reduce_scatter_tensor": lambda x: reduce_scatter(x, torch.cat([x.cos(), x.sin()])),
    "all_to_all": lambda x: dist.all_to_all(halves(x), halves(x.cos())),
    "all_to_all_single": lambda x: dist.all_to_all_single(x, x.cos()),
    "irecv": functools.partial(exchanged, waits=True),
    "batch_isend_irecv": functools.partial(exchanged, waits=False),
    "recv": received,
    "a method of the group": lambda x: dist.group.WORLD.allreduce([x]).wait(),  # type: ignore[union-attr]
    "functional all_reduce_": lambda x: _functional.wait_tensor(_functional.all_reduce_(x, "sum", _name())),
    "functional all_reduce_coalesced_": lambda x: [
        _functional.wait_tensor(half) for half in _functional.all_reduce_coalesced_(halves(x), "sum", _name())
    ],
    "functional broadcast_": lambda x: _functional.wait_tensor(_functional.broadcast_.default(x, 0, _name())),
    "functional all_gather_into_tensor_out": lambda x: _functional.wait_tensor(
        _functional.all_gather_into_tensor_out(halves(x)[0].clone(), 2, _name(), out=x)
    ),
    "op allreduce_": functools.partial(op, dist.all_reduce),
    "op broadcast_": functools.partial(op, lambda x: dist.broadcast(x, 0)),
    "op _allgather_base_": functools.partial(op, lambda x: all_gather(x, x.chunk(2)[0].clone())),
}

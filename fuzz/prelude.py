"""The names that every program starts with; executed anew for each run, so that nothing is shared."""

from __future__ import annotations

import collections
import contextvars
import copy
import functools
import gc
import math
import random
import tempfile
import weakref
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import reactivate
from reactivate import policies

__all__ = ["F", "collections", "copy", "functools", "gc", "math", "policies", "reactivate", "weakref"]

SCALE: contextvars.ContextVar[float] = contextvars.ContextVar("SCALE", default=1.5)
COUNTS = {"calls": 0}
DEVICE = torch.get_default_device()
STREAM = torch if DEVICE.type == "cpu" else torch.get_device_module(DEVICE)
G, R, A = torch.Generator(DEVICE).manual_seed(1), random.Random(1), numpy.random.default_rng(1)


class Shelf:
    """A storage that copies, and gives its copies back with the strides in another order: those are the engine's affair."""

    def save(self, tensor: Tensor) -> Any:
        return Copied(_reversed(tensor)) if tensor.layout is torch.strided else tensor

    def load(self, handle: Any) -> Tensor:
        return _reversed(handle.tensor).clone() if isinstance(handle, Copied) else handle


class Copied:
    """A copy of a tensor, with its dimensions in the opposite order."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.clone(memory_format=torch.contiguous_format)

    def held(self) -> list[Tensor]:
        """Return the copy, for reports."""
        return [self.tensor]


def _reversed(tensor: Tensor) -> Tensor:
    return tensor.permute(*range(tensor.dim() - 1, -1, -1))


SHELF, HOST = Shelf(), reactivate.storage.Host(least_bytes=0)
DISK = reactivate.storage.Disk(tempfile.gettempdir(), least_bytes=0, last=0)


class Holder:
    """A plain object."""

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor


SHARED = Holder(0)


class Config:
    """A configuration, compared by identity."""

    def __init__(self, inner: Any = None) -> None:
        self.scale = 0.5
        self.inner = inner

    def half(self) -> float:
        """Return half of the scale, of the inner configuration where there is one."""
        return (self if self.inner is None else self.inner).scale / 2


@dataclass
class Box:
    """Arguments in a dataclass."""

    x: Tensor
    more: dict[str, Any] = field(default_factory=dict)


class Bulk(torch.autograd.Function):
    """A function that saves an input twice, None, and its output, and reads them twice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        out = (x * y).sin()
        ctx.save_for_backward(x, None, y, x, out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, _, y, _, out = ctx.saved_tensors
        slope = (ctx.saved_tensors[3] * y).cos() + 0 * out
        return grad * slope * y, grad * slope * x


class Base(nn.Module):
    """The members that all blocks share."""

    calls = 0
    step = 0

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.mix = nn.Parameter(torch.eye(4))
        self.register_buffer("stat", torch.zeros(4))


def counted(module: nn.Module, args: Any, out: Tensor) -> Tensor:
    """Scale by the number of calls; a forward hook."""
    module.seen.append(out.detach().sum())
    return out * len(module.seen)


class Past(nn.Module):
    """A layer whose first call makes the list, or the tensor, that every call goes on with."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        """Go on with what there is."""
        mean = x.detach().float().mean()
        if not hasattr(self, "past"):
            self.past: Any = [] if self.kind == "list" else torch.zeros(()) if self.kind == "tensor" else {"all": []}
        if self.kind == "tensor":
            self.past += mean
        else:
            (self.past if self.kind == "list" else self.past["all"]).append(mean)
        return self.lin(x)

    def read(self) -> Tensor:
        """Return a number that depends on all calls so far."""
        if self.kind == "tensor":
            return self.past.clone()
        return torch.stack(self.past if self.kind == "list" else self.past["all"]).mean()


def reread(tensor: Tensor) -> Tensor:
    """Return a copy that was written to once, as one from a file is; an unpack hook."""
    return torch.empty_like(tensor).copy_(tensor)


def same(tensor: Tensor) -> Tensor:
    """Return the tensor; a pack or unpack hook."""
    return tensor


def leaves(blocks: list[nn.Module], *inputs: Tensor) -> list[Tensor]:
    """Return the inputs and the parameters that exist and need a gradient."""
    found = [x for x in inputs if x.requires_grad]
    for block in blocks:
        found += [parameter for parameter in block.parameters() if parameter.requires_grad]
    unique = {id(leaf): leaf for leaf in found if not nn.parameter.is_lazy(leaf)}
    return list(unique.values())


def store(found: list[Tensor], gradients: tuple[Tensor | None, ...]) -> None:
    """Put what `torch.autograd.grad` returned into `.grad`."""
    for leaf, gradient in zip(found, gradients):
        leaf.grad = gradient


def squares(gradients: tuple[Tensor | None, ...]) -> Tensor:
    """Return a scalar that depends on every gradient with a graph."""
    return sum(grad.float().square().sum() for grad in gradients if grad is not None and grad.requires_grad)

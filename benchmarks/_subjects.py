"""The subjects of the comparison: the ways to checkpoint a function, each at its best, and none at all."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from queue import SimpleQueue
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.utils import checkpoint as upstream

import reactivate

Function = Callable[[Tensor], Tensor]
Wrap = Callable[[Function], Function]

PLAIN = "plain"
TORCH = "torch non-reentrant"
REENTRANT = "torch reentrant"
REMAT = "torch_remat"
OURS = "reactivate"
PER_CALL = "reactivate, built per call"
INSTALLED = "reactivate, installed"

ALL_OURS = (OURS, PER_CALL, INSTALLED)
MAIN = (TORCH, REENTRANT, REMAT, OURS)
EVERY = (TORCH, REENTRANT, REMAT, *ALL_OURS)


def make_subjects() -> dict[str, Wrap]:
    """{name: function -> the same function, checkpointed}. Without torch_remat where that is not installed."""
    subjects: dict[str, Wrap] = {
        PLAIN: lambda fn: fn,
        TORCH: lambda fn: partial(upstream.checkpoint, fn, use_reentrant=False),
        REENTRANT: lambda fn: partial(upstream.checkpoint, fn, use_reentrant=True),
        OURS: reactivate.checkpoint,
        PER_CALL: lambda fn: lambda x: reactivate.checkpoint(fn)(x),
        INSTALLED: _installed(),
    }
    if find_spec("torch_remat"):
        subjects[REMAT] = _remat
    for name, wrap in subjects.items():
        _check(name, wrap)
    return subjects


def version_of_remat() -> str | None:
    """None if it is not installed."""
    try:
        return version("torch_remat")
    except PackageNotFoundError:
        return None


def _installed() -> Wrap:
    """Return the function that code which calls `torch.utils.checkpoint.checkpoint` gets while reactivate is installed.

    It is copied out of an installation that ends here, because the others are to be measured in the same process, and
    torch_remat calls torch's functions as well. A copy, since the end of an installation takes all references back.
    """
    with reactivate.dropin.install():
        function = _copy(upstream.checkpoint)
    return lambda fn: partial(function, fn, use_reentrant=False)


def _copy(function: Any) -> FunctionType:
    code, namespace = function.__code__, function.__globals__
    copied = FunctionType(code, namespace, function.__name__, function.__defaults__, function.__closure__)
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied


def _remat(fn: Function) -> Function:
    """All of the function is recomputed, as by the others; it restores no random state and checks no metadata."""
    import torch_remat  # an optional package

    checkpointed: Function = torch_remat.checkpoint(region_name="region")(fn)
    return checkpointed


def _check(name: str, wrap: Wrap) -> None:
    """A subject must do what its name says: run the function once more in the backward, on the engine it names."""
    noted: SimpleQueue[bool] = SimpleQueue()  # which no recomputation rewinds

    def probe(x: Tensor) -> Tensor:
        noted.put(reactivate.is_recomputing())
        return x.sin()

    wrap(probe)(torch.ones(1, requires_grad=True)).backward()
    expected = [False] if name == PLAIN else [False, name in ALL_OURS]
    runs = [noted.get() for _ in range(noted.qsize())]
    if runs != expected:
        raise RuntimeError(
            f"{name} is not what it is measured as: its function ran with is_recomputing() = {runs}, not {expected}."
        )


def differs_from_plain(wrap: Wrap, make: Callable[[], tuple[torch.nn.Module, Tensor]]) -> list[str]:
    """List what one step changes against plain, bit for bit: some of outputs, gradients, buffers, random numbers."""
    plain, ours = _one_step(lambda fn: fn, make), _one_step(wrap, make)
    return [what for what in plain if not all(map(torch.equal, plain[what], ours[what]))]


def _one_step(wrap: Wrap, make: Callable[[], tuple[torch.nn.Module, Tensor]]) -> dict[str, list[Any]]:
    torch.manual_seed(0)
    model, x = make()
    output = wrap(model)(x)
    output.backward(torch.ones_like(output))
    return {
        "output": [output.detach()],
        "gradients": [x.grad, *(parameter.grad for parameter in model.parameters())],
        "buffers": [*model.buffers()],
        "random numbers": [torch.rand(4, device=x.device)],
    }

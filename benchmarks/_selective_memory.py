"""Memory in bytes: what a forward pass keeps for the backward, and what a step needs at its peak."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import torch
from _selective_examples import watched
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import record_function
from torch.utils._python_dispatch import TorchDispatchMode

Forward = Callable[[], Tensor]
"""A forward pass, to a tensor from which a backward pass begins."""


def kept_bytes(forward: Forward, model: nn.Module) -> int:
    """Bytes of the storages that wait for the backward, each once, without parameters.

    Hooks around the call see what autograd and the systems keep, and what regions keep of their arguments. SAC keeps
    results where no hook sees them, in the dispatch mode that its context function made, and so that is searched.
    Not counted is what is no activation, such as states of random number generators.
    """
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, Tensor] = {}

    def count(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    before = {id(mode) for mode in _modes()}
    with saved_tensors_hooks(count, lambda tensor: tensor):
        output = forward()
    for mode in _modes():
        if id(mode) not in before:
            for tensor in _tensors_in(mode):
                count(tensor)
    total = sum(tensor.untyped_storage().nbytes() for pointer, tensor in kept.items() if pointer not in parameters)
    kept.clear()
    output.sum().backward()
    return total


def allocated_bytes(forward: Forward, device: torch.device) -> tuple[int, int]:
    """Return what torch has allocated after the forward pass, and at the peak of the step, over what there was before it.

    Whatever holds it: also the result of the forward pass, and states of random number generators.
    """
    forward().sum().backward()  # what is made once is made now
    if device.type == "cpu":
        return _allocated_on_the_host(forward)
    torch.accelerator.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    output = forward()
    after = torch.cuda.memory_allocated(device)
    output.sum().backward()
    torch.accelerator.synchronize(device)
    return after - before, torch.cuda.max_memory_allocated(device) - before


def _allocated_on_the_host(forward: Forward) -> tuple[int, int]:
    def step() -> None:
        with record_function("forward"):
            output = forward()
        output.sum().backward()

    timeline = watched(step)
    return timeline.kept_bytes, timeline.peak_bytes


def _modes() -> list[TorchDispatchMode]:
    return [found for found in gc.get_objects() if issubclass(type(found), TorchDispatchMode)]


def _tensors_in(value: object, depth: int = 6) -> Iterator[Tensor]:
    """List the tensors that an object leads to: SAC has {op: {number of the call: [wrapped tensor]}}."""
    if isinstance(value, Tensor):
        yield value
    elif depth and not isinstance(value, type):
        for inner in gc.get_referents(value):
            yield from _tensors_in(inner, depth - 1)

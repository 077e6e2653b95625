"""Memory that is allocated before a step, and by the optimizer."""

from __future__ import annotations

import copy
import gc
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from reactivate._inspect.fake import faked, has_no_memory
from reactivate._region.accounts import Ledger
from reactivate._torch.dynamo import DispatchMode
from reactivate._torch.ops import flatten
from reactivate.planner.contents import Fixed
from reactivate.planner.cost.devices import DeviceSpec
from reactivate.planner.step import TrainingStep
from reactivate.planner.trace.records import Costs, Trace
from reactivate.planner.trace.tracer import traced
from reactivate.planner.units import bucket_bytes

_THREADS = 2  # the one that runs the forward pass, and autograd's
_WITH_BIAS = {"addmm", "_addmm_activation", "_scaled_mm", "_int_mm"}  # by the second library, if they can be
_PRODUCTS = _WITH_BIAS.union(
    ("mm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "vdot", "_grouped_mm", "_scaled_grouped_mm")
)


def fixed_memory(step: TrainingStep) -> Fixed:
    """Return the bytes that are there all the time, each storage once; without an optimizer's."""
    ledger, model = Ledger(), step.model
    parameters = ledger.enter_all([*model.parameters(), *model.buffers()])
    inputs = ledger.enter_all(leaf for leaf in flatten((step.args, step.kwargs))[0] if isinstance(leaf, Tensor))
    return Fixed(parameters, step.gradient_bytes, 0, inputs, bucket_bytes(model))


def others_on(device: torch.device, step: TrainingStep, optimizer: Optimizer | None) -> int:
    """Return the bytes on an accelerator that are none of the step's: other tensors, and workspaces of its libraries.

    A CPU's memory is everybody's, and nothing of it counts but buckets.
    """
    model = step.model
    if device.type == "cpu":
        return bucket_bytes(model)
    parameters = list(model.parameters())
    gradients = [item.grad for item in parameters if item.grad is not None]
    state = [] if optimizer is None else _state_of(optimizer)
    leaves = [*parameters, *model.buffers(), *gradients, *state, *flatten((step.args, step.kwargs))[0]]
    own = Ledger().enter_all(leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.device.type == device.type)
    gc.collect()  # what steps have left in cycles will go
    return max(int(torch.accelerator.memory_allocated(device)) - own, 0)  # buckets among it


def workspaces_on(spec: DeviceSpec, trace: Trace) -> int:
    """Return the bytes that torch allocates for libraries of matrix products, and keeps.

    cuBLAS has a workspace for each thread that calls it. For products with a bias, torch uses cuBLASLt, which in most of its
    releases has another one (torch's CublasHandlePool.cpp). Workspaces of convolutions depend on what is measured there.
    """
    names = {op.name for op in trace.ops}
    libraries = (not names.isdisjoint(_PRODUCTS)) + (not names.isdisjoint(_WITH_BIAS))
    return spec.workspace_bytes * _THREADS * libraries


def optimizer_memory(optimizer: Optimizer | None, model: Module, costs: Costs, device: torch.device) -> tuple[int, int]:
    """Return the bytes that an optimizer keeps, and the most that its step allocates beside that. Nothing is computed.

    Args:
        optimizer: of `model`; it is not changed. None for one that needs nothing.
        device: where tensors on the meta device are to seem to be.
    """
    if optimizer is None:
        return 0, 0
    originals = list(model.parameters())
    with faked(model, (), {}, device):
        fakes = dict(zip(map(id, originals), model.parameters()))
        twin = _twin_of(optimizer, fakes)
        for fake in fakes.values():
            if fake.requires_grad:
                fake.grad = torch.empty_like(fake)
        with _AnyValue():
            twin.step()  # makes its state
        state = _state_of(twin)
        gradients = [fake.grad for fake in fakes.values() if fake.grad is not None]
        with _AnyValue(), traced({}, [*fakes.values(), *gradients, *state], costs) as trace:
            twin.step()
    return Ledger().enter_all(state), trace.peak_bytes


class _AnyValue(DispatchMode):
    """Answer an optimizer that asks for a number, as for a norm: any will do, since memory does not depend on it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and has_no_memory(args[0]):
            return 1.0 if args[0].is_floating_point() else 1
        return func(*args, **(kwargs or {}))


def _twin_of(optimizer: Optimizer, fakes: Mapping[int, Tensor]) -> Optimizer:
    twin = copy.copy(optimizer)
    twin.param_groups = [
        {**group, "params": [fakes[id(item)] for item in group["params"] if id(item) in fakes]}
        for group in optimizer.param_groups
    ]
    twin.state = defaultdict(dict)
    return twin


def _state_of(optimizer: Optimizer) -> list[Tensor]:
    leaves = flatten([dict(value) for value in optimizer.state.values()])[0]
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]

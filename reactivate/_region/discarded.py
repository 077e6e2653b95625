"""Discarded outputs: nodes that saved what a region returned let go of it, and a recomputation of the region gives it back.

The region's last op saves its outputs, in slots as all that is saved in a region, and what that op returns is not used. So
its node, which no backward runs, has every output again when it is asked for them, and the nodes of the consumers hold that
node in the place of the tensor. The graph is what it is without: gradients are summed in the same order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from reactivate._snapshot.geometry import memory_of
from reactivate._torch.autograd import Rebuild, nodes_since, replace_saved, saved_by
from reactivate._torch.ops import flatten


class _Save(torch.autograd.Function):
    """Saves its arguments."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return tensors[0].new_empty(0)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise AssertionError("the result is not used")


def call_and_save(function: Callable[..., Any], *args: Any) -> tuple[Any, Tensor | None]:
    """Call a function; return the result, and a tensor whose node has saved the tensors in it, if any has a gradient."""
    result = function(*args)
    tensors = differentiable(result)
    return result, _Save.apply(*tensors) if tensors else None


def differentiable(result: Any) -> list[Tensor]:
    """Return the tensors in a result, in containers of any kind, that have a gradient."""
    return [item for item in flatten(result)[0] if isinstance(item, Tensor) and item.requires_grad]


class Outputs:
    """The outputs of one region that `call_and_save` was the function of.

    Args:
        result: what the function returned.
        saved: the tensor whose node has saved what is in it.
        args: of the function.

    Attributes:
        tensors: {their place among what the node has saved: the outputs}. Leaves, which the caller has anyway, are none, nor
            is what has the memory of an input, which the region keeps.
    """

    def __init__(self, result: Any, saved: Tensor, args: tuple[Any, ...]) -> None:
        kept = {memory_of(item) for item in flatten(args)[0] if isinstance(item, Tensor)} - {None}
        self.tensors = {
            place: item
            for place, item in enumerate(differentiable(result))
            if not item.is_leaf and memory_of(item) not in kept
        }
        self._saved = saved  # which holds the node: before torch 2.12 Python's handle of a node does not
        self._versions = {place: tensor._version for place, tensor in self.tensors.items()}

    @property
    def node(self) -> Any:
        """The node that has saved the outputs."""
        return self._saved.grad_fn

    def modified(self) -> Tensor | None:
        """Return an output that was modified in place since, if there is one."""
        return next(
            (tensor for place, tensor in self.tensors.items() if tensor._version != self._versions[place]), None
        )

    def lead_to(self, tensor: Tensor) -> bool:
        """Return whether `tensor` depends on any output."""
        edges = {get_gradient_edge(output)[:2] for output in self.tensors.values()}
        used = {edge for node in nodes_since(tensor, self.node) for edge in node.next_functions}
        return not edges.isdisjoint(used | {get_gradient_edge(tensor)[:2]})

    def rebuild_of(self, saved: Tensor) -> Rebuild | None:
        """Return what rebuilds a saved tensor that is an output, or a view of one."""
        if type(saved) is not Tensor or saved.layout is not torch.strided or saved.is_conj() or saved.is_neg():
            return None
        for place, output in self.tensors.items():
            if saved.dtype == output.dtype and _memory(saved) == _memory(output):
                offset = int(saved.storage_offset() - output.storage_offset())
                return functools.partial(_again, self._saved, place, saved.shape, saved.stride(), offset)
        return None


def discard(regions: Sequence[Outputs], tensor: Tensor) -> None:
    """Take the outputs of regions from all nodes between these and `tensor`, in one go.

    A second go over the same nodes would find nothing: before torch 2.12 each of them shows what it has saved once.
    """

    def rebuild_of(saved: Tensor) -> Rebuild | None:
        return next(filter(None, (outputs.rebuild_of(saved) for outputs in regions)), None)

    nodes = {node for outputs in regions for node in nodes_since(tensor, outputs.node)}
    for node in nodes:
        for saved in saved_by(node):
            replace_saved(saved, rebuild_of)


def _memory(tensor: Tensor) -> int | None:
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else None


def _again(saved: Any, place: int, shape: torch.Size, stride: tuple[int, ...], offset: int) -> Tensor:
    output: Tensor = saved.grad_fn.saved_tensors[place]
    if output.shape == shape and output.stride() == stride and offset == 0:
        return output
    with torch.no_grad():
        return output.as_strided(shape, stride, output.storage_offset() + offset)

"""Discarded outputs: nodes that saved what a region returned let go of it, and a recomputation of the region gives it back.

The last op of the region saves its outputs, in slots as all that is saved in a region. So the node of that op has every
output again when a backward asks for it, and the nodes of the consumers hold that node instead of the tensor.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from reactivate._torch.containers import flatten, unflatten
from reactivate._torch.raw_saved import Rebuild, nodes_since, replace_saved, saved_by


class _Return(torch.autograd.Function):
    """Returns its arguments and saves them."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients


def call_and_return(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function so that the tensors can be discarded that it returns, in containers too."""
    outputs, structure = flatten(function(*args))
    places = [index for index, item in enumerate(outputs) if isinstance(item, Tensor) and item.requires_grad]
    if places:
        for index, tensor in zip(places, _Return.apply(*(outputs[index] for index in places))):
            outputs[index] = tensor
    return unflatten(outputs, structure)


class Outputs:
    """The outputs of one region that `call_and_return` was the function of.

    Attributes:
        node: the node of the op that returned them.
    """

    def __init__(self, tensors: list[Tensor]) -> None:
        assert tensors
        self.node: Any = tensors[0].grad_fn
        self._tensors = tensors
        self._versions = [tensor._version for tensor in tensors]

    def modified(self) -> Tensor | None:
        """Return an output that somebody has modified in place since, if there is one."""
        found = (tensor for tensor, version in zip(self._tensors, self._versions) if tensor._version != version)
        return next(found, None)

    def discard_from(self, tensor: Tensor) -> int | None:
        """Take the outputs from all nodes between `tensor` and the region.

        Returns:
            From how many saved tensors; None if `tensor` does not depend on any output.
        """
        nodes = list(nodes_since(tensor, self.node))
        if self.node not in nodes:
            return None
        nodes.remove(self.node)
        return sum(replace_saved(saved, self._rebuild_of) for node in nodes for saved in saved_by(node))

    def _rebuild_of(self, saved: Tensor) -> Rebuild | None:
        """Return what rebuilds a saved tensor that is an output, or a view of one."""
        if type(saved) is not Tensor or saved.layout is not torch.strided or saved.is_conj() or saved.is_neg():
            return None
        for index, output in enumerate(self._tensors):
            if saved.dtype == output.dtype and _memory(saved) == _memory(output):
                offset = int(saved.storage_offset() - output.storage_offset())
                return functools.partial(_again, self.node, index, saved.shape, saved.stride(), offset)
        return None


def _memory(tensor: Tensor) -> int | None:
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else None


def _again(node: Any, index: int, shape: torch.Size, stride: tuple[int, ...], offset: int) -> Tensor:
    output: Tensor = node.saved_tensors[index]
    if output.shape == shape and output.stride() == stride and offset == 0:
        return output
    with torch.no_grad():
        return output.as_strided(shape, stride, output.storage_offset() + offset)

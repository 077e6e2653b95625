"""How a tensor that a call saved for its backward can be had again from the arguments of the call.

A linear layer saves its input, flattened, and its weight, transposed: neither need be kept where a replay makes the
argument again. In this order: an argument itself; a view of one; a copy of one, made by casting (autocast) or by making
it contiguous, which is found by walking autograd's graph from the copy back to the argument. What is none of these is
the call's own, and has to be kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from reactivate._compat import FakeTensor

_PLAIN = (Tensor, Parameter, FakeTensor)
Change = Callable[[Tensor], Tensor]


class Recipe(NamedTuple):
    """A tensor made from an argument, or from a leaf that is none of the arguments.

    Attributes:
        argument: which one, -1 for the leaf.
        view: the size, the strides and how far behind the argument's beginning, for a view of it.
        make: what to do with it otherwise; None for the argument itself.
        leaf: a parameter, or None.
    """

    argument: int
    view: tuple[Any, Any, Any] | None = None
    make: Change | None = None
    leaf: Tensor | None = None

    def follow(self, arguments: Sequence[Tensor]) -> Tensor:
        """The tensor, from the arguments of a replay."""
        source = (arguments[self.argument] if self.leaf is None else self.leaf).detach()
        if self.view is not None:
            size, stride, offset = self.view
            return source.as_strided(size, stride, source.storage_offset() + offset)
        return source if self.make is None else self.make(source)


class Sources:
    """The arguments of one call, to be recognised in what it saves. They are few: a scan is faster than a dict."""

    __slots__ = ("arguments",)

    def __init__(self, arguments: list[Tensor]) -> None:
        self.arguments = arguments

    def recipe_for(self, tensor: Tensor) -> Recipe | None:
        """How to make `tensor`, or None if it is the call's own."""
        index = self.which(tensor)
        if index >= 0:
            return Recipe(index)
        if not _is_plain(tensor):
            return None
        index = self.sharing_memory(tensor)
        return self._copy(tensor) if index < 0 else self._view(index, tensor)

    def which(self, tensor: Tensor) -> int:
        """The number of the argument that `tensor` is, or -1."""
        for index, argument in enumerate(self.arguments):
            if argument is tensor:
                return index
        return -1

    def sharing_memory(self, tensor: Tensor) -> int:
        """The number of an argument whose memory `tensor` lies in, or -1."""
        base = tensor if tensor._base is None else tensor._base
        for index, argument in enumerate(self.arguments):
            if argument is base or argument._base is base:
                return index
        # Made out of autograd's sight: by `detach`, or in a kernel.
        if base is tensor and not tensor.requires_grad and _is_plain(tensor):
            return self._sharing_storage(tensor)
        return -1

    def _sharing_storage(self, tensor: Tensor) -> int:
        memory = tensor.untyped_storage()._cdata
        for index, argument in enumerate(self.arguments):
            if _is_plain(argument) and argument.untyped_storage()._cdata == memory:
                return index
        return -1

    def _view(self, index: int, tensor: Tensor) -> Recipe | None:
        source = self.arguments[index]
        if source.dtype != tensor.dtype or source.is_conj() or source.is_neg() or tensor.is_conj() or tensor.is_neg():
            return None
        offset = tensor.storage_offset() - source.storage_offset()
        return Recipe(index, (tensor.size(), tensor.stride(), offset))

    def _copy(self, tensor: Tensor) -> Recipe | None:
        if tensor.grad_fn is None:
            return self._copy_without_graph(tensor)
        nodes = {(item.grad_fn, item.output_nr): index for index, item in enumerate(self.arguments) if item.grad_fn}
        changes, end, size = _way_back(tensor, nodes)
        index = nodes.get(end, -1)
        leaf: Any = None
        if index < 0:
            leaf = getattr(end[0], "variable", None)
            if leaf is None:
                return None
            index = self.which(leaf)
        source = leaf if index < 0 else self.arguments[index]
        if source.size() != size:
            return None
        changes.reverse()
        return Recipe(index, None, _as(tensor, changes), leaf if index < 0 else None)

    def _copy_without_graph(self, tensor: Tensor) -> Recipe | None:
        """A copy of an argument that needs no gradient leaves no trace: only its contents show what it is."""
        for index, argument in enumerate(self.arguments):
            if argument.requires_grad or type(argument) not in _PLAIN or argument.numel() != tensor.numel():
                continue
            if not (argument.is_floating_point() and tensor.is_floating_point()) or argument.device != tensor.device:
                continue
            for change in _LAYOUTS:
                make = _as(tensor, [lambda value: value.to(tensor.dtype), change])
                changed = change(argument.detach())
                if changed.size() == tensor.size() and _are_equal(changed.to(tensor.dtype), tensor):
                    return Recipe(index, None, make)
        return None


def _are_equal(one: Tensor, other: Tensor) -> bool:
    # A fake tensor has no contents: what has the size of a copy is taken for one.
    if type(other) is FakeTensor:
        return True
    other = other.detach()
    return torch.equal(one, other) and torch.equal(one.signbit(), other.signbit())  # -0.0 is equal to 0.0


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) in _PLAIN and tensor.layout is torch.strided


_LAYOUTS: tuple[Change, ...] = (
    lambda value: value,
    lambda value: value.t() if value.ndim == 2 else value,
    lambda value: value.flatten(0, -2) if value.ndim > 2 else value,
)


def _as(tensor: Tensor, changes: Sequence[Change]) -> Change:
    """`changes` one after the other, with the strides of `tensor` in the end."""
    size, stride, dtype = tensor.size(), tensor.stride(), tensor.dtype

    def make(value: Tensor) -> Tensor:
        if value.dtype != dtype:
            value = value.to(dtype)
        for change in changes:
            value = change(value)
        if value.size() == size and value.stride() != stride:
            value = torch.empty_strided(size, stride, dtype=dtype, device=value.device).copy_(value)
        return value

    return make


Node = tuple[Any, int]  # with the number of the output
Size = tuple[int, ...]


def _way_back(tensor: Tensor, ends: Mapping[Node, Any]) -> tuple[list[Change], Node, Size]:
    """What each node before `tensor` did, as long as it only copied, last first; the node that did more, and its size."""
    node: Any = tensor.grad_fn
    end: Node = (node, tensor.output_nr)
    size: Size = tensor.size()
    casts, changes = 0, []
    while node is not None and end not in ends:
        name = node.name()
        undo = _COPIES.get(name)
        if undo is None or (name == "ToCopyBackward0" and casts):
            break
        casts += name == "ToCopyBackward0"
        change, size = undo(node, size)
        if change is not None:
            changes.append(change)
        end = node.next_functions[0]
        node = end[0]
    return changes, end, size


def _same(node: Any, size: Size) -> tuple[Change | None, Size]:
    return None, size


def _view(node: Any, size: Size) -> tuple[Change | None, Size]:
    return lambda value: value.reshape(size), node._saved_self_sym_sizes


def _expand(node: Any, size: Size) -> tuple[Change | None, Size]:
    before = node._saved_self_sym_sizes
    return (None if before == size else lambda value: value.expand(size)), before


def _t(node: Any, size: Size) -> tuple[Change | None, Size]:
    return lambda value: value.t(), size[::-1]


def _transpose(node: Any, size: Size) -> tuple[Change | None, Size]:
    one, other = _signed(node._saved_dim0), _signed(node._saved_dim1)
    sizes = list(size)
    sizes[one], sizes[other] = sizes[other], sizes[one]
    return lambda value: value.transpose(one, other), tuple(sizes)


def _permute(node: Any, size: Size) -> tuple[Change | None, Size]:
    dims = [_signed(dim) % len(size) for dim in node._saved_dims]
    sizes = [0] * len(size)
    for place, dim in enumerate(dims):
        sizes[dim] = size[place]
    return lambda value: value.permute(dims), tuple(sizes)


def _unsqueeze(node: Any, size: Size) -> tuple[Change | None, Size]:
    dim = _signed(node._saved_dim) % len(size)
    return lambda value: value.unsqueeze(dim), (*size[:dim], *size[dim + 1 :])


def _signed(dim: int) -> int:
    return dim - 2**64 if dim >= 2**63 else dim


_COPIES: dict[str, Callable[[Any, Size], tuple[Change | None, Size]]] = {
    "AliasBackward0": _same,
    "CloneBackward0": _same,
    "ExpandBackward0": _expand,
    "PermuteBackward0": _permute,
    "ReshapeAliasBackward0": _view,
    "TBackward0": _t,
    "ToCopyBackward0": _same,
    "TransposeBackward0": _transpose,
    "UnsafeViewBackward0": _view,
    "UnsqueezeBackward0": _unsqueeze,
    "ViewBackward0": _view,
}

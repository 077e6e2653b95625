"""Derived tensors: what a call saved for its backward, rebuilt from the arguments of the call.

A linear layer saves its input, flattened, and its weight, transposed: neither need be kept where a recomputation makes the
argument again. In this order: an argument itself; a view of one; a copy of one, made by casting (autocast) or by making
it contiguous, which is found by walking autograd's graph from the copy back to the argument. What is none of these is
the call's own, and has to be kept.

A relation holds for what it was seen for: the call itself has made the copy (its nodes are newer than the call), neither
the copy nor the argument has been written to (their version counters), and contents are never compared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from reactivate._torch.modes import FakeTensor

_PLAIN = (Tensor, Parameter, FakeTensor)

Change = Callable[[Tensor], Tensor]
Node = tuple[Any, int]  # with the number of the output
Size = tuple[int, ...]


class Derivation(NamedTuple):
    """A tensor derived from an argument, or from a leaf that is none of the arguments.

    Attributes:
        argument: which one, -1 for the leaf.
        version: of the argument or the leaf, when the relation was seen.
        view: the strides of the argument; and the size, the strides and how far behind the argument's beginning, for a
            view of it.
        make: what to do with it otherwise; None for the argument itself.
        leaf: a parameter, or None.
    """

    argument: int
    version: int
    view: tuple[Any, Any, Any, Any] | None = None
    make: Change | None = None
    leaf: Tensor | None = None

    def source(self, arguments: Sequence[Tensor]) -> Tensor:
        """The tensor that it is derived from, among the arguments of a recomputation."""
        return arguments[self.argument] if self.leaf is None else self.leaf

    def follow(self, arguments: Sequence[Tensor]) -> Tensor:
        """The tensor, from the arguments of a recomputation."""
        source = self.source(arguments).detach()
        if self.view is not None:
            strides, size, stride, offset = self.view
            if source.stride() != strides:  # hooks around the region have made a copy of another layout
                source = _with_strides(source, strides)
            return source.as_strided(size, stride, source.storage_offset() + offset)
        return source if self.make is None else self.make(source)


@dataclass(slots=True, eq=False)
class Sources:
    """The arguments of one call, to be recognised in what it saves. They are few: a scan is faster than a dict.

    Attributes:
        arguments: the tensors among them.
        first_node: the number that the next node of autograd's had when the call began: later ones are the call's.
        is_torchs: whether no code of the user's runs in it, which could write to a copy between making and saving it.
        leaves: {id: version} of parameters that it may read, when it began.
        casts: {node: version}: casts of leaves that calls before it made, as autocast keeps them, and the version of the
            leaf then.
    """

    arguments: list[Tensor]
    first_node: int
    is_torchs: bool
    leaves: Mapping[int, int]
    casts: dict[Any, int]

    def derivation_of(self, tensor: Tensor) -> Derivation | None:
        """Return how to derive `tensor`, or None if it is the call's own."""
        index = self.which(tensor)
        if index >= 0:
            return Derivation(index, tensor._version)
        if not _is_plain(tensor):
            return None
        index = self.sharing_memory(tensor)
        return self._copy(tensor) if index < 0 else self._view(index, tensor)

    def is_earlier_cast(self, tensor: Tensor) -> bool:
        """Return whether `tensor` is a copy of a leaf from before the call, as autocast keeps them of parameters."""
        node: Any = tensor.grad_fn
        is_earlier = False
        while node is not None and node.name() in COPIES:
            is_earlier = node._sequence_nr() < self.first_node
            node = node.next_functions[0][0]
        return is_earlier and getattr(node, "variable", None) is not None

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

    def _view(self, index: int, tensor: Tensor) -> Derivation | None:
        source = self.arguments[index]
        if source.dtype != tensor.dtype or source._version != tensor._version:  # with a counter of its own: `.data`
            return None
        if source.is_neg() or tensor.is_neg() or source.is_conj() or tensor.is_conj():
            return None
        offset = tensor.storage_offset() - source.storage_offset()
        return Derivation(index, source._version, (source.stride(), tensor.size(), tensor.stride(), offset))

    def _copy(self, tensor: Tensor) -> Derivation | None:
        """Return how to copy an argument or a leaf, if the call made `tensor` so and nothing wrote to it afterwards.

        A copy without a graph leaves no trace, and its contents would prove nothing: it is kept.
        """
        if tensor.grad_fn is None or tensor._version:
            return None
        nodes = {(item.grad_fn, item.output_nr): index for index, item in enumerate(self.arguments) if item.grad_fn}
        changes, end, last, size = self._way_back(tensor, nodes)
        index = nodes.get(end, -1)
        leaf: Any = None
        if index < 0:
            leaf = getattr(end[0], "variable", None)
            index = self.which(leaf)
            if last is None or leaf is None or not self._is_unwritten(leaf, index, last):
                return None
        source = leaf if index < 0 else self.arguments[index]
        if last is None or source.size() != size:
            return None
        return Derivation(index, source._version, None, _as(tensor, changes[::-1]), leaf if index < 0 else None)

    def _is_unwritten(self, leaf: Tensor, index: int, last: Any) -> bool:
        """Return whether a copy of `leaf` is still equal to it: the leaf has the version of when the copy was made."""
        if last._sequence_nr() < self.first_node:
            return self.casts[last] == leaf._version
        if self.is_torchs:
            self.casts[last] = leaf._version
            return True
        return index >= 0 or self.leaves.get(id(leaf)) == leaf._version

    def _way_back(self, tensor: Tensor, ends: Mapping[Node, Any]) -> tuple[list[Change], Node, Any, Size]:
        """Walk from `tensor` as far back as it was only copied, by nodes that the call has made.

        The user's code may write to a copy before it copies that again, which leaves no trace: there may be one copy only.

        Returns:
            What each node did, last first; the first node that did more than copy; the node before it, None if there is no
            way; and the size of its output.
        """
        node: Any = tensor.grad_fn
        end: Node = (node, tensor.output_nr)
        size: Size = tensor.size()
        casts = copies = 0
        changes: list[Change] = []
        last: Any = None
        while node is not None and end not in ends:
            name = node.name()
            undo = COPIES.get(name)
            if undo is None or (name == "ToCopyBackward0" and casts):
                break
            if node._sequence_nr() < self.first_node and node not in self.casts:
                return [], end, None, size
            casts += name == "ToCopyBackward0"
            copies += name in OF_NEW_MEMORY
            change, size = undo(node, size)
            if change is not None:
                changes.append(change)
            last = node
            end = node.next_functions[0]
            node = end[0]
        return changes, end, last if copies <= 1 or self.is_torchs else None, size


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) in _PLAIN and tensor.layout is torch.strided


def _as(tensor: Tensor, changes: Sequence[Change]) -> Change:
    """`changes` one after the other, with the strides of `tensor` in the end."""
    size, stride, dtype = tensor.size(), tensor.stride(), tensor.dtype

    def make(value: Tensor) -> Tensor:
        if value.dtype != dtype:
            value = value.to(dtype)
        for change in changes:
            value = change(value)
        if value.size() == size and value.stride() != stride:
            value = _with_strides(value, stride)
        return value

    return make


def _with_strides(value: Tensor, strides: Sequence[int]) -> Tensor:
    return torch.empty_strided(value.size(), strides, dtype=value.dtype, device=value.device).copy_(value)


# -- ops whose argument can be had from their node ------------------------------------------------------------------------


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


OF_NEW_MEMORY = frozenset({"CloneBackward0", "ToCopyBackward0", "UnsafeViewBackward0"})  # with a version of its own


COPIES: dict[str, Callable[[Any, Size], tuple[Change | None, Size]]] = {
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

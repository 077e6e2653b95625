"""The ops whose result a recomputation can derive from a tensor that it has, by the names of their nodes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

Change = Callable[[Tensor], Tensor]
Node = tuple[Any, int]  # with the number of the output


Size = tuple[int, ...]


class Derivation(NamedTuple):
    """The way from a copy back to what it is a copy of.

    Attributes:
        changes: what each node did, last first.
        end: the first node that did more than copy, with the number of its output.
        last: the node before it.
        size: that of its output.
    """

    changes: list[Change]
    end: Node
    last: Any
    size: Size


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

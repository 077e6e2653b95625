"""Proof that a write of the forward does not matter: the recomputation, which reads what the forward left, computes the
same outputs.

A function may write to an argument or a parameter of which there is no copy: it logs into a slice, it renormalises rows
that it reads afterwards. Whether a recomputation comes out the same cannot be told beforehand, so it is tried: the
outputs of both passes are compared by checksum (Rule 24).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from reactivate._compat import flatten
from reactivate._engine.inputs import WrittenInput
from reactivate._engine.oplog import checksum
from reactivate._state.contents import WeakTensor
from reactivate._state.shadows import version_of


class Proof:
    """What a forward wrote to without a copy being there, and the checksums of its outputs.

    Attributes:
        written: (tensor, `WeakTensor` or `WrittenInput`; its place; its version after the forward).
    """

    def __init__(self, written: list[tuple[Any, str]], result: Any) -> None:
        self.written = [(item, place, version_of(_tensor_of(item))) for item, place in written]
        self._checksums = _checksums(result)

    def tensors(self) -> Iterator[tuple[Tensor, str]]:
        """Return (tensor, place) of those that a recomputation may write to as well."""
        for item, place, _ in self.written:
            if isinstance(item, Tensor):
                yield item, place

    def version_after(self, tensor: Any) -> int | None:
        """Return the version that `tensor` had after the forward, None if that did not write to it."""
        return next((version for item, _, version in self.written if item is tensor), None)

    def holds(self, result: Any) -> bool:
        """Return whether a recomputation's outputs are those of the forward."""
        return _checksums(result) == self._checksums

    def places(self) -> str:
        """Return where the tensors were found, for a message."""
        return ", ".join(place for _, place, _ in self.written)


def _tensor_of(item: Any) -> Any:
    return item.alias if isinstance(item, WrittenInput) else item.get() if isinstance(item, WeakTensor) else item


def _checksums(result: Any) -> list[Any]:
    return [
        (leaf.shape, leaf.dtype, checksum(leaf)) if isinstance(leaf, Tensor) else None for leaf in flatten(result)[0]
    ]

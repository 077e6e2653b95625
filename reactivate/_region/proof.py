"""Proof that a write of the forward does not matter: the recomputation, which reads what the forward left, computes the
same outputs.

A function may write to an argument or a parameter of which there is no copy: it logs into a slice, it renormalises rows
that it reads afterwards. Whether a recomputation comes out the same cannot be told beforehand, so it is tried: the
outputs of both passes are compared by checksum, or where the forward took checksums of what autograd saved, these
(Rule 24).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from reactivate._passes.oplog import checksum
from reactivate._region import naming
from reactivate._snapshot.geometry import memory_of
from reactivate._snapshot.held import WeakTensor
from reactivate._snapshot.inputs import WrittenInput
from reactivate._snapshot.shadows import note_written
from reactivate._snapshot.tensor_states import version_of
from reactivate._torch.dynamo import DispatchMode
from reactivate._torch.modes import run_unseen
from reactivate._torch.ops import call_counted, flatten
from reactivate._types import Unrestored

if TYPE_CHECKING:
    from reactivate._region.region import Region
    from reactivate._snapshot.call import Call


def find_written(region: Region, call: Call) -> list[Unrestored]:
    """Return what the forward of a region, which is over, wrote to without a copy being there.

    Of an argument with a gradient a recomputation reads what the forward left from now on.
    """
    written = region.moment.finish()
    if region.inputs or region.reached is not None:
        written += region.unrestored_inputs()
    for tensor, spec, version in zip(call.given, call.specs, call.versions):
        if tensor._version != version:
            left = tensor if tensor.is_leaf else WrittenInput(tensor)
            region.replaced = {**region.replaced, id(spec): left}
            written.append(Unrestored(left, naming.place_of(region, spec), version))
    return written


class WriteProof:
    """The tensors that a forward wrote to without a copy, and the checksums of its outputs.

    Attributes:
        written: the tensors, each a `WeakTensor` or a `WrittenInput` in the place of one with a graph.
        is_settled: whether a recomputation has shown it; later ones need not.
    """

    def __init__(self, written: list[Unrestored], result: Any) -> None:
        self.written = written
        self.is_settled = False
        self._versions = self._present_versions()
        self._checksums = _checksums(result)

    def _present_versions(self) -> list[int]:
        return [version_of(_tensor_of(item.tensor)) for item in self.written]

    def tensors(self) -> list[tuple[Tensor, int]]:
        """Return those that a recomputation may write to as well, with the versions that they had before the forward."""
        found = [(item.tensor, item.version) for item in self.written if isinstance(item.tensor, Tensor)]
        weak = [(item.tensor.alias, item.version) for item in self.written if isinstance(item.tensor, WeakTensor)]
        return found + weak

    def covers(self, tensor: Any, *, is_checked: bool) -> bool:
        """Return whether comparing what is computed shows if it matters what `tensor` holds now.

        Args:
            tensor: one of those that were modified since the forward began.
            is_checked: whether saved tensors are compared too. Then it may have been modified again: by the same region in
                the next microbatch, say.
        """
        versions = zip(self.written, self._versions)
        after = next((version for item, version in versions if item.tensor is tensor), None)
        return after is not None and (is_checked or after == tensor._version)

    def holds_now(self) -> None:
        """Note that a comparison has shown what the tensors hold now not to matter."""
        self._versions = self._present_versions()

    def ask_for_copies(self) -> None:
        """Keep copies of the tensors from the next region on."""
        for tensor, _ in self.tensors():
            note_written(tensor)

    def holds(self, result: Any) -> bool:
        """Return whether a recomputation's outputs are those of the forward."""
        return _checksums(result) == self._checksums

    def places(self) -> list[str]:
        """Return where the tensors were found, for a message."""
        return [item.place for item in self.written]


def _tensor_of(item: Any) -> Any:
    return item.alias if isinstance(item, WrittenInput) else item.get() if isinstance(item, WeakTensor) else item


def _checksums(result: Any) -> list[Any]:
    return [
        (leaf.shape, leaf.dtype, run_unseen(checksum, leaf)) if isinstance(leaf, Tensor) else None
        for leaf in flatten(result)[0]
    ]


class RenormsOnce(DispatchMode):
    """Skips the renormalisation of embeddings that the forward has done: it would move some rows again."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()
        self._done = {memory_of(tensor) for tensor in tensors}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.embedding_renorm_.default and memory_of(args[0]) in self._done:
            return args[0]
        return call_counted(func, args, kwargs)

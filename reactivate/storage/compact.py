"""Compact tensors: the elements of a tensor, each once and side by side, in the order in which they lie in memory.

A storage that moves bytes takes the run of memory that a tensor spans, with what lies in its gaps. One that computes on the
elements must not see what belongs to others: it may be huge, or never have been written.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from reactivate.storage.placement import plain_of


@dataclass(frozen=True)
class Compact:
    """The way from a tensor to its elements, and back.

    Attributes:
        size, stride: of the tensor, without dimensions along which one element is seen several times.
        span: how many elements of memory the tensor reaches over.
        has_gaps: whether there are others among these.
        order: of the dimensions, the largest stride first.
    """

    size: tuple[int, ...]
    stride: tuple[int, ...]
    span: int
    has_gaps: bool
    order: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> Compact:
        """Return that of a tensor with memory of its own."""
        stride = tuple(tensor.stride())
        size = tuple(1 if step == 0 else length for length, step in zip(tensor.size(), stride))
        if tensor.numel() == 0:
            return cls(tuple(tensor.size()), stride, 0, False, tuple(range(tensor.dim())))
        order = tuple(sorted(range(len(size)), key=lambda dim: (-stride[dim], dim)))
        reach, count, overlaps = 1, 1, False  # of the dimensions looked at so far, the smallest stride first
        for dim in reversed(order):
            if size[dim] > 1:
                overlaps = overlaps or stride[dim] < reach
                reach += (size[dim] - 1) * stride[dim]
                count *= size[dim]
        return cls(size, stride, reach, count < reach and not overlaps, order)

    def elements_of(self, tensor: Tensor) -> Tensor:
        """Return the elements, one-dimensional; a copy where there are gaps."""
        plain = plain_of(tensor)
        if self.has_gaps:
            distinct = plain.as_strided(self.size, self.stride, plain.storage_offset())
            return distinct.permute(self.order).reshape(-1).resolve_neg()
        return plain.as_strided((self.span,), (1,), plain.storage_offset()).resolve_neg()

    def run_of(self, elements: Tensor) -> Tensor:
        """Return memory that a tensor of the same strides may look at, from elements that `elements_of` returned."""
        if not self.has_gaps:
            return elements
        run = elements.new_empty(self.span)
        target = torch.as_strided(run, self.size, self.stride).permute(self.order)
        target.copy_(elements.view(target.size()))
        return run

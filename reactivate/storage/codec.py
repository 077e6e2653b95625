"""Numbers of fewer bits: floating point numbers as whole multiples of a step, which each block has of its own.

`bits` make 2 ** bits codes. Three of these are infinity, minus infinity and NaN, which come back as they were and change
nothing of the numbers beside them. The others, from -top to top, say `(code - zero) * step`. Zero is always zero.

A block's step is its largest magnitude by `top`; with a zero point, the distance of its smallest and its largest number (or
of zero) by `2 * top`. Numbers are rounded to the nearest multiple. No random numbers are drawn.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

BITS = (4, 8)
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_AT_ONCE = 1 << 20  # elements: more would need much memory beside that of the tensor


class Coded(NamedTuple):
    """Numbers of fewer bits.

    Attributes:
        codes: one byte each, or two in a byte.
        steps: one for each block.
        zeros: the code of zero in each block; None without zero points.
    """

    codes: Tensor
    steps: Tensor
    zeros: Tensor | None


@dataclass(frozen=True)
class Codec:
    """A way to write numbers with fewer bits.

    Args:
        bits: 4 or 8.
        block: how many numbers have a step of their own.
        zero_point: whether a block may have more codes above zero than below.
    """

    bits: int
    block: int
    zero_point: bool

    @property
    def top(self) -> int:
        """Return the largest code of a number."""
        return int(2 ** (self.bits - 1)) - 2

    def encode(self, elements: Tensor) -> Coded:
        """Return one-dimensional floating point numbers in codes."""
        blocks = -(-elements.numel() // self.block)
        codes = elements.new_empty(blocks * self.block * self.bits // 8, dtype=torch.uint8)
        steps = elements.new_empty(blocks, dtype=_computed_in(elements.dtype))
        zeros = elements.new_empty(blocks, dtype=torch.int8) if self.zero_point else None
        for start, stop in self._chunks(blocks):
            table = self._table(elements, start, stop)
            is_finite = _can_look_at(table) and bool(table.sum().isfinite())
            step, zero = self._step(table if is_finite else _finite(table))
            coded = self._coded(table, step, zero, is_finite)
            codes[self._bytes(start) : self._bytes(stop)] = self._packed(coded)
            steps[start:stop] = step
            if zeros is not None and zero is not None:
                zeros[start:stop] = zero
        return Coded(codes, steps, zeros)

    def decode(self, coded: Coded, count: int, dtype: torch.dtype) -> Tensor:
        """Return numbers from codes.

        Args:
            coded: the codes.
            count: how many numbers there are.
            dtype: theirs.
        """
        blocks = len(coded.steps)
        elements = coded.steps.new_empty(blocks * self.block, dtype=dtype)
        for start, stop in self._chunks(blocks):
            codes = self._unpacked(coded.codes[self._bytes(start) : self._bytes(stop)])
            table = codes.to(coded.steps.dtype).view(stop - start, self.block)
            if coded.zeros is not None:
                table -= coded.zeros[start:stop, None]
            table *= coded.steps[start:stop, None]
            largest = torch.finfo(dtype).max
            table.clamp_(-largest, largest)
            if not _can_look_at(codes) or int(codes.amax()) > self.top or int(codes.amin()) < -self.top:
                for code, value in self._not_finite():
                    table.view(-1).masked_fill_(codes == code, value)
            elements[start * self.block : stop * self.block] = table.view(-1)
        return elements[:count]

    def bound(self, elements: Tensor) -> Tensor:
        """Return the most by which each number may come back as another one."""
        blocks = -(-elements.numel() // self.block)
        bounds = elements.new_empty(blocks * self.block, dtype=_computed_in(elements.dtype))
        info = torch.finfo(elements.dtype)
        for start, stop in self._chunks(blocks):
            table = self._table(elements, start, stop)
            finite = _finite(table)
            half = self._step(finite)[0][:, None] * 0.501  # of a step, with the roundings of the computation
            rounded = finite.abs() * info.eps + info.tiny  # to the dtype
            bounds[start * self.block : stop * self.block] = (rounded + half).view(-1)
        return bounds[: elements.numel()]

    def _chunks(self, blocks: int) -> Iterator[tuple[int, int]]:
        size = max(1, _AT_ONCE // self.block)
        return ((start, min(start + size, blocks)) for start in range(0, blocks, size))

    def _bytes(self, blocks: int) -> int:
        return blocks * self.block * self.bits // 8

    def _table(self, elements: Tensor, start: int, stop: int) -> Tensor:
        """Return a copy of some blocks, a row each. What is missing in the last one is zero."""
        part = elements[start * self.block : stop * self.block]
        table = part.new_zeros((stop - start) * self.block, dtype=_computed_in(part.dtype))
        table[: part.numel()] = part
        return table.view(stop - start, self.block)

    def _step(self, table: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the step of each row, and the code of zero in it. All numbers are finite."""
        least = torch.finfo(table.dtype).tiny
        low, high = table.amin(1).clamp_(max=0), table.amax(1).clamp_(min=0)
        if not self.zero_point:
            return (torch.maximum(-low, high) / self.top).clamp_(min=least), None
        step = (high / (2 * self.top) - low / (2 * self.top)).clamp_(min=least)
        return step, (-self.top - (low / step).round_()).clamp_(-self.top, self.top).to(torch.int8)

    def _coded(self, table: Tensor, step: Tensor, zero: Tensor | None, is_finite: bool) -> Tensor:
        codes = (table / step[:, None]).round_()
        if zero is not None:
            codes += zero[:, None]
        codes.clamp_(-self.top, self.top)
        if not is_finite:
            for (code, _), which in zip(self._not_finite(), (table == torch.inf, table == -torch.inf, table.isnan())):
                codes.masked_fill_(which, code)
        return codes.view(-1).to(torch.int8)

    def _not_finite(self) -> tuple[tuple[int, float], ...]:
        return (self.top + 1, torch.inf), (-self.top - 1, -torch.inf), (-self.top - 2, torch.nan)

    def _packed(self, codes: Tensor) -> Tensor:
        if self.bits == 8:
            return codes.view(torch.uint8)
        pairs = (codes + 8).view(torch.uint8).view(-1, 2)
        return pairs[:, 0] | (pairs[:, 1] << 4)

    def _unpacked(self, codes: Tensor) -> Tensor:
        if self.bits == 8:
            return codes.view(torch.int8)
        return torch.stack([codes & 15, codes >> 4], dim=1).view(-1).view(torch.int8) - 8


def _computed_in(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float64 else torch.float32


def _can_look_at(tensor: Tensor) -> bool:
    """Return whether to look at elements costs no wait for a device; a fake tensor has none."""
    return type(tensor) is Tensor and tensor.device.type == "cpu"


def _finite(table: Tensor) -> Tensor:
    return table.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)

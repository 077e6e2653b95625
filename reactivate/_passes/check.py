"""The self-check (Rule 25): the first recomputation of each region is compared with its forward, and ever fewer later.

What no rule foresaw, a write that no version counter sees or state in a place that is not looked at, changes what a
recomputation computes. So in the first call of a region, and in its 2nd, 4th, 8th, ..., both passes take checksums of the
tensors that autograd saves, on the device, and one comparison at the end reads them.

A checksum is made of sums of the bits as 64-bit integers: exact, without a large temporary, at the speed of memory. A
profile beside it, of floating-point sums, tells a difference of rounding size, from kernels that were chosen anew, from a
missed state.

The gradients depend on the saved tensors alone. So a compared recomputation stops as early as any other: to run what comes
after the last of them would do once more what no rule puts back. Where it runs to its end, for a proof or because it may
not stop early, the outputs are compared too, and a difference of these alone is none that matters.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from reactivate._bits import checksum, checksum_of, elements_in_a_row
from reactivate._passes.stale import comes_from_stale, watches
from reactivate._snapshot.geometry import has_memory
from reactivate._torch.flags import is_any_autocast_enabled
from reactivate._torch.modes import run_unseen
from reactivate._torch.ops import flatten
from reactivate._types import Unrestored
from reactivate.errors import ReactivateError

_PLAIN = (Tensor, Parameter)
_ROUNDINGS, _COARSE_ROUNDINGS = 64, 4
"""How many units in the last place, of the norm of a row, a difference of rounding size may have: of floats of
32 bits or more, and of smaller ones, whose sums are computed in 32 bits and rounded once."""
_FAR_LARGER = 10
"""By how many powers of two an element must be larger than is usual to be cut off: as errors of rounding, its own would hide
all others."""
_SAMPLES = 1 << 10
"""How many elements show what is usual."""
_ROWS, _AT_ONCE = 16, 2
"""How many sums a profile has, which is held until the backward, and of how many there is a copy at a time."""
OUTPUTS = 1 << 30
"""The number of the first output, behind those of all saved tensors."""
NOTHING: frozenset[int] = frozenset()
"""No numbers."""


class Profile(NamedTuple):
    """The elements of a tensor in a few rows, summed up with weights, also with large ones cut off, and those left over.

    Attributes:
        sums: of the rows: other numbers, or the same in another order, have other sums.
        norms: of the rows, of which a difference of rounding size is a small part.
    """

    sums: Tensor
    norms: Tensor


class Sums(NamedTuple):
    """Sums of one tensor, on its device.

    Attributes:
        bits: of its bits as integers.
        is_sure: whether they are those of the tensor in the end; an op may fill one without a graph after it had it saved,
            as rrelu does.
        profile: of its elements, None if these are no floats.
        unit: the relative distance of two floats of the type.
    """

    bits: Tensor
    is_sure: bool
    profile: Profile | None
    unit: float


class Check:
    """Checksums of one pass.

    Attributes:
        sums: by the number of the saved tensor, or of the output.
        versions: of the outputs, by their numbers.
        has_same_results: whether a proof has found the outputs to be those of the forward.
        recomputed: those of the last recomputation that came to its end.
        doubtful: errors of tensors that were modified since the forward: the comparison shows whether that matters.
    """

    def __init__(self) -> None:
        self.sums: dict[int, Sums] = {}
        self.versions: dict[int, int] = {}
        self.has_same_results = False
        self.recomputed: Check | None = None
        self.doubtful: list[ReactivateError] = []

    def note(self, number: int, tensor: Tensor) -> None:
        """Take the checksum of a tensor, if it has bits to look at that come from what the forward had."""
        if watches and comes_from_stale(tensor):
            return
        sums = run_unseen(_sums_of, tensor)
        if sums is not None:
            self.sums[number] = sums

    def note_outputs(self, result: Any) -> None:
        """Take the checksums of the outputs."""
        for index, leaf in enumerate(flatten(result)[0]):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                self.note(OUTPUTS + index, leaf)
                self.versions[OUTPUTS + index] = leaf._version

    def difference(self, other: Check, but: Container[int] = NOTHING, also: Container[int] = NOTHING) -> int | None:
        """Return the number of the first tensor that differs in another pass, None if none does.

        Args:
            but: the numbers of those that do not count.
            also: the numbers of those that count although their checksums are not sure.
        """
        return min(self.differences(other, also, but), default=None)

    def differences(
        self, other: Check, also: Container[int] = NOTHING, but: Container[int] = NOTHING
    ) -> frozenset[int]:
        """Return the numbers of all tensors that differ in another pass; `but` and `also` as in `difference`."""
        numbers = self._common(other, but, also)
        ones, others = ([check.sums[number].bits for number in numbers] for check in (self, other))
        if not numbers or run_unseen(_are_equal, ones, others):
            return NOTHING
        pairs = zip(numbers, ones, others)
        return frozenset(number for number, one, two in pairs if not run_unseen(torch.equal, one, two))

    def unsure(self) -> frozenset[int]:
        """Return the numbers of the tensors whose checksums are not sure."""
        return frozenset(number for number, sums in self.sums.items() if not sums.is_sure)

    def has_all(self, count: int) -> bool:
        """Return whether there is a checksum of each of so many saved tensors."""
        return all(number in self.sums for number in range(count))

    def proves(self, other: Check, numbers: Iterable[int]) -> bool:
        """Return whether each of these tensors is known to be the same in another pass."""
        pairs = [(self.sums.get(number), other.sums.get(number)) for number in numbers]
        found = [(one.bits, two.bits) for one, two in pairs if one is not None and two is not None]
        return len(found) == len(pairs) and (not found or bool(run_unseen(_are_equal, *map(list, zip(*found)))))

    def is_on_cpu(self) -> bool:
        """Return whether no accelerator computed any of the tensors."""
        return all(item.bits.device.type == "cpu" for item in self.sums.values())

    def is_rounding(self, other: Check, but: Container[int] = NOTHING, also: Container[int] = NOTHING) -> bool:
        """Return whether every difference to another pass is one of rounding size; `but` and `also` as in `difference`."""
        numbers = self._common(other, but, also)
        return all(run_unseen(_is_rounding, self.sums[number], other.sums[number]) for number in numbers)

    def _common(self, other: Check, but: Container[int] = NOTHING, also: Container[int] = NOTHING) -> list[int]:
        """Return the numbers of what both passes have, but for inputs given back that were written to in between."""
        found = self.sums.keys() & other.sums.keys()
        return sorted(
            number
            for number in found
            if number not in but
            and (self.sums[number].is_sure or number in also)
            and self.versions.get(number) == other.versions.get(number)
        )


class BitsBefore:
    """Checksums of tensors of which there is no copy, before a forward that may write to them without a new version.

    Args:
        tensors: each with where it was found.
    """

    def __init__(self, tensors: Iterable[tuple[Tensor, str]]) -> None:
        self._before: list[Any] = run_unseen(self._looked_at, tensors)

    @staticmethod
    def _looked_at(tensors: Iterable[tuple[Tensor, str]]) -> list[Any]:
        found = [item for item in tensors if _is_looked_at(item[0]) and has_memory(item[0])]
        return [(*item, item[0]._version, *_bits_and_place(item[0])) for item in found]

    def written(self) -> list[Unrestored]:
        """Return those that hold something else by now, in the same memory and with the version that they had."""
        return run_unseen(self._written)  # type: ignore[no-any-return]

    def _written(self) -> list[Unrestored]:
        found = []
        for tensor, place, version, before, where in self._before:
            if tensor._version == version and has_memory(tensor):
                now, is_where = _bits_and_place(tensor)
                if is_where == where and not torch.equal(before, now):
                    found.append(Unrestored(tensor, place, version))
        return found


def _bits_and_place(tensor: Tensor) -> tuple[Tensor, Any]:
    return checksum_of(tensor), (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)


def _is_looked_at(tensor: Tensor) -> bool:
    if type(tensor) not in _PLAIN or tensor.layout is not torch.strided:
        return False
    return tensor.device.type not in ("xla", "meta") and tensor.numel() > 0 and not tensor.is_quantized


def _sums_of(tensor: Tensor) -> Sums | None:
    if not _is_looked_at(tensor):
        return None
    if is_any_autocast_enabled():  # it would round, and refuse to put pieces of two dtypes together
        torch.autocast_increment_nesting()  # the outermost context would drop the cache of what was cast by hand
        try:
            with torch.autocast(tensor.device.type, enabled=False):
                return _sums_without_autocast(tensor)
        finally:
            torch.autocast_decrement_nesting()
    return _sums_without_autocast(tensor)


def _sums_without_autocast(tensor: Tensor) -> Sums:
    flat = elements_in_a_row(tensor)
    bits = checksum(flat)
    if not flat.is_floating_point():
        return Sums(bits, tensor.requires_grad, None, 0.0)
    return Sums(bits, tensor.requires_grad, _profile_of(flat), torch.finfo(flat.dtype).eps)


def _profile_of(flat: Tensor) -> Profile:
    """Return the profile of all elements, and that of the same with far larger ones cut off, as masked logits are."""
    if flat.dtype not in (torch.float32, torch.float64):
        flat = flat.float()
    rows = min(_ROWS, len(flat))
    width = len(flat) // rows
    table, rest = flat[: rows * width].view(rows, width), flat[rows * width :]
    # Like no other, and none small.
    weights = torch.arange(width, device=flat.device, dtype=flat.dtype).mul_(2.4).cos_()
    exponents = flat[:: len(flat) // _SAMPLES + 1].abs().log2()
    is_counted = exponents.isfinite()  # zeros and infinite ones say nothing of the others
    usual = exponents.where(is_counted, 0).sum() / is_counted.sum().clamp(min=1)
    most = torch.exp2(usual.floor() + _FAR_LARGER)
    sums, norms = [torch.mv(table, weights)], [table.norm(dim=1)]
    for part in table.split(_AT_ONCE):
        cut = part.clamp(-most, most)
        sums.append(torch.mv(cut, weights))
        norms.append(cut.norm(dim=1))
    typical = torch.cat(norms[1:]).norm() / (rows * width) ** 0.5
    return Profile(torch.cat([*sums, rest]), torch.cat([*norms, torch.maximum(rest.abs(), typical)]))


def _are_equal(some: list[Tensor], others: list[Tensor]) -> bool:
    devices = {item.device for item in (*some, *others)}
    if len(devices) > 1:
        return all(map(torch.equal, some, others))
    return torch.equal(torch.stack(some), torch.stack(others))


def _is_rounding(one: Sums, other: Sums) -> bool:
    if torch.equal(one.bits, other.bits):
        return True
    if one.profile is None or other.profile is None or len(one.profile.sums) != len(other.profile.sums):
        return False
    distance = (one.profile.sums - other.profile.sums).abs()
    return bool(
        (distance <= (_ROUNDINGS if one.unit < 1e-6 else _COARSE_ROUNDINGS) * one.unit * one.profile.norms).all()
    )

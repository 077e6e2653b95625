"""Fewer bits for each number: the one storage of the package that does not give back every bit."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from torch import Tensor

from reactivate._text.sizes import size
from reactivate._text.words import described
from reactivate._types import DEVICE, Storage
from reactivate.errors import UsageError
from reactivate.storage.codec import BITS, Codec
from reactivate.storage.moved import Traffic
from reactivate.storage.quantizing import Quantizing


@dataclass(frozen=True, repr=False)
class Lossy:
    """Keep tensors with 8 or 4 bits a number. Gradients are not those of the plain model.

    Every other storage gives back every bit; this one does not, and nothing chooses it but you. `explain` marks what it
    keeps as not exact, and `verify` reports how far the gradients are off instead of calling the model the same. Outputs,
    buffers and random numbers stay those of the plain model: only what the backward reads is rounded.

    `block` numbers that lie side by side in memory share a step: their largest magnitude by 126 with 8 bits, by 6 with 4.
    Each number is rounded to the nearest multiple of it, without random numbers, and so comes back at most half a step off
    (`bound`). Infinities and NaN come back as they were, zeros without their sign; none changes the numbers beside it. With
    `zero_point=True` the step is the block's range by 252 or 12, which is finer where most numbers have one sign, as after
    ReLU, GELU and softmax.

    Floating point tensors of 16, 32 and 64 bits are rounded. All others (integers, booleans, complex and 8-bit numbers) are
    kept with every bit. Parameters and other leaves, and small tensors, stay as they are. Shapes, strides, dtypes and
    subclasses come back.

    Args:
        bits: 8 or 4.
        block: how many numbers share a step: an even number. Each step takes 4 bytes, or 8 for float64.
        zero_point: take the block's smallest and largest number in the place of its largest magnitude.
        least_bytes: smaller tensors stay as they are; an int or a text ("4KiB").
        storage: what keeps the codes: `Host()`, to move a quarter of the bytes. The device by default.

    Raises:
        UsageError: an argument is none of these.

    Examples:
        >>> import reactivate
        >>> lossy = reactivate.storage.Lossy(bits=8)
        >>> policy = reactivate.policies.full(inputs=lossy)
    """

    bits: int = 8
    block: int = field(default=128, kw_only=True)
    zero_point: bool = field(default=False, kw_only=True)
    least_bytes: int | str = field(default=2**12, kw_only=True)
    storage: Storage = field(default=DEVICE, kw_only=True)
    exact = False
    _quantizing: Quantizing = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.bits not in BITS or isinstance(self.bits, bool):
            raise UsageError(f"Lossy(bits=...) takes 8 or 4; got {self.bits!r}.")
        is_number = isinstance(self.block, int) and not isinstance(self.block, bool)
        if not is_number or self.block < 2 or self.block % 2:
            raise UsageError(f"Lossy(block=...) takes an even number of at least 2; got {self.block!r}.")
        storage: Any = self.storage
        if isinstance(storage, type) or not all(callable(getattr(storage, name, None)) for name in ("save", "load")):
            raise UsageError(f"Lossy(storage=...) takes a storage such as Host(); got {described(storage)}.")
        if not storage.exact:
            raise UsageError(f"Lossy(storage=...) takes a storage that gives back every bit; got {storage!r}.")
        least_bytes = size(self.least_bytes, "Lossy(least_bytes=...)")
        codec = Codec(self.bits, self.block, bool(self.zero_point))
        object.__setattr__(self, "least_bytes", least_bytes)
        object.__setattr__(self, "_quantizing", Quantizing(codec, least_bytes, storage))

    def save(self, tensor: Tensor) -> Any:
        return self._quantizing.save(tensor)

    def load(self, handle: Any) -> Tensor:
        return self._quantizing.load(handle)

    def bound(self, tensor: Tensor) -> Tensor | None:
        """Return the most by which each element of `tensor` comes back as another number: half a step, and its rounding.

        None if it comes back with every bit. The result is as large as the tensor: for tests.
        """
        return self._quantizing.bound(tensor)

    @property
    def is_collective(self) -> bool:
        """Return whether each load needs the same load on other ranks."""
        return getattr(self.storage, "is_collective", False)

    @property
    def traffic(self) -> Traffic:
        """Counts of the tensors that were rounded so far, and of those that stayed, with the reasons."""
        return self._quantizing.traffic

    def __repr__(self) -> str:
        given = [item for item in fields(self) if item.init and item.name != "bits"]
        others = [(item.name, getattr(self, item.name)) for item in given if getattr(self, item.name) != item.default]
        return f"Lossy({', '.join(f'{name}={value!r}' for name, value in [('bits', self.bits), *others])})"

    def __reduce__(self) -> Any:
        return _lossy, (self.bits, self.block, self.zero_point, self.least_bytes, self.storage)

    def __deepcopy__(self, memo: Any) -> Lossy:
        return _lossy(self.bits, self.block, self.zero_point, self.least_bytes, self.storage)


def _lossy(bits: int, block: int, zero_point: bool, least_bytes: int | str, storage: Storage) -> Lossy:
    return Lossy(bits, block=block, zero_point=zero_point, least_bytes=least_bytes, storage=storage)

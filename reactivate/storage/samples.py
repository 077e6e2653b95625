"""Tensors of all kinds, to see whether a storage gives them back as they were."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor


class Plain(Tensor):
    """A plain subclass."""


class Pair(Tensor):
    """A tensor that is made of two tensors."""

    first: Tensor
    second: Tensor

    @staticmethod
    def __new__(cls, first: Tensor, second: Tensor) -> Any:
        return Tensor._make_wrapper_subclass(
            cls, first.size(), strides=first.stride(), dtype=first.dtype, device=first.device
        )

    def __init__(self, first: Tensor, second: Tensor) -> None:
        self.first = first
        self.second = second

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["first", "second"], None

    @staticmethod
    def __tensor_unflatten__(parts: dict[str, Tensor], context: Any, size: Any, stride: Any) -> Pair:
        return Pair(parts["first"], parts["second"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        def on(name: str) -> Any:
            return func(*(getattr(arg, name) if isinstance(arg, Pair) else arg for arg in args), **(kwargs or {}))

        first, second = on("first"), on("second")
        return Pair(first, second) if isinstance(first, Tensor) else first


def numbers(size: tuple[int, ...], device: str, seed: int = 0) -> Tensor:
    """Return numbers that are the same each time."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, generator=generator, device="cpu").to(device)


def of_every_dtype(device: str) -> dict[str, Tensor]:
    """Return a tensor of random bits for each dtype that the device has."""
    found = {}
    bits = torch.randint(0, 256, (32, 16), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    for dtype in _dtypes():
        tensor = (bits > 127) if dtype is torch.bool else bits.view(dtype)
        try:
            found[str(dtype)] = tensor.to(device).clone()
        except (TypeError, RuntimeError):
            continue  # MPS and XLA have no float64, for one; and older torch cannot copy the newest dtypes
    return found


def _dtypes() -> list[torch.dtype]:
    """Return all dtypes of whole bytes but those of quantized tensors, which have more than bits."""
    found = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    return sorted((dtype for dtype in found if not _NO_BYTES.fullmatch(str(dtype))), key=str)


_NO_BYTES = re.compile(r"torch\.(q.*|bits.*|u?int[1-7])")


def of_every_layout(device: str) -> dict[str, Tensor]:
    """Return tensors of all kinds of strides."""
    matrix = numbers((6, 8), device)
    image = numbers((2, 3, 4, 4), device)
    return {
        "contiguous": numbers((6, 8), device),
        "transposed": numbers((6, 8), device).t(),
        "expanded": numbers((6, 1), device).expand(6, 8),
        "a part with an offset": matrix[2:5, 1:7:2],
        "a small part of much": numbers((64, 8), device)[63, 3:5],
        "channels_last": image.contiguous(memory_format=torch.channels_last),
        "overlapping": numbers((16,), device).as_strided((4, 4), (2, 1), 3),
        "empty": torch.empty(0, 5, device=device),
        "an empty part": matrix[2:2],
        "of no dimension": numbers((), device),
        "an element": matrix[3, 4],
    }


def lazy(device: str) -> dict[str, Tensor]:
    """Return tensors whose values are computed when they are read."""
    values = torch.complex(numbers((4, 6), "cpu"), numbers((4, 6), "cpu", 1)).to(device)
    return {
        "a conjugate": values.clone().conj(),
        "a transposed conjugate": values.clone().mH,
        "a negative": values.clone().conj().imag,
        "a transposed negative": values.clone().conj().imag.t()[1:],
    }


class Look:
    """A look at a tensor as it goes in, to compare what comes back with."""

    def __init__(self, tensor: Tensor) -> None:
        self._facts = _facts(tensor)
        self._bits = _bits(tensor)

    def check(self, found: Tensor, name: str) -> None:
        """Assert that `found`, which came back, is the same; `name` is that of the property and the tensor."""
        assert isinstance(found, Tensor), f"{name}, but as a {type(found).__name__}"
        facts = _facts(found)
        for fact, expected in self._facts.items():
            assert facts[fact] == expected, f"{name}, but its {fact} is {facts[fact]} where it was {expected}"
        different = int((_bits(found) != self._bits).sum())
        assert different == 0, f"{name}, but {different:,} of its {self._bits.numel():,} bytes are different"


def _facts(tensor: Tensor) -> dict[str, Any]:
    return {
        "class": type(tensor).__name__,
        "dtype": tensor.dtype,
        "device": tensor.device,
        "size": tuple(tensor.size()),
        "stride": tensor.stride(),
    }


def _bits(tensor: Tensor) -> Tensor:
    plain = tensor.detach().as_subclass(Tensor).resolve_conj().resolve_neg().cpu()
    return torch.empty(plain.size(), dtype=plain.dtype).copy_(plain).view(-1).view(torch.uint8)

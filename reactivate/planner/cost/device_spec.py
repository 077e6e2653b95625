"""The description of a device: its memory, and how fast it computes and moves bytes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from reactivate.errors import UsageError
from reactivate.planner.cost.links import Link
from reactivate.planner.cost.overhead import Overhead

FORMATS = ("float64", "float32", "tfloat32", "bfloat16", "float16", "float8")
"""What a device may have a rate for. "tfloat32" is float32 tensors multiplied in TF32; "float8" is every 8-bit float."""


@dataclass(frozen=True)
class DeviceSpec:
    """The speed and memory of a device.

    Attributes:
        name: what it is called.
        memory_bytes: its memory, as torch reports it.
        bandwidth_bytes_per_second: peak of reads and writes of that memory.
        flops_per_second: peak of dense matrix products, by the format of their inputs (`FORMATS`); float32 at least.
        source: where the numbers are from.
        launch_seconds: what an op costs however small it is.
        compute_efficiency: the part of `flops_per_second` that matrix products reach.
        bandwidth_efficiency: the part of `bandwidth_bytes_per_second` that ops reach.
        links: {name of a storage: the way to it}: "host", "disk".
        overhead: what the engine itself takes, on the host of the device.

    Raises:
        UsageError: a value is of the wrong type, or no device can have it.
    """

    name: str
    memory_bytes: int
    bandwidth_bytes_per_second: float
    flops_per_second: Mapping[str, float] = field(hash=False)
    source: str
    launch_seconds: float = 5e-6
    compute_efficiency: float = 0.6
    bandwidth_efficiency: float = 0.8
    links: Mapping[str, Link] = field(default_factory=dict, hash=False)
    overhead: Overhead = field(default_factory=Overhead)

    def __post_init__(self) -> None:
        for key in ("name", "source"):
            self._check(key, isinstance(getattr(self, key), str) and getattr(self, key) != "", "a text")
        self._check("memory_bytes", type(self.memory_bytes) is int and self.memory_bytes > 0, "an int above 0")
        self._check("bandwidth_bytes_per_second", _is_rate(self.bandwidth_bytes_per_second), "a number above 0")
        self._check("launch_seconds", _is_number(self.launch_seconds) and self.launch_seconds >= 0, "a number from 0")
        for key in ("compute_efficiency", "bandwidth_efficiency"):
            value = getattr(self, key)
            self._check(key, _is_rate(value) and value <= 1, "a number above 0, at most 1")
        self._check_rates()
        is_links = isinstance(self.links, Mapping) and all(isinstance(link, Link) for link in self.links.values())
        self._check("links", is_links, '{"host": Link(...), ...}')
        self._check("overhead", isinstance(self.overhead, Overhead), "Overhead(...)")

    def _check_rates(self) -> None:
        rates = self.flops_per_second
        is_complete = isinstance(rates, Mapping) and "float32" in rates
        self._check("flops_per_second", is_complete, '{"float32": FLOPs per second, ...}')
        for format_, rate in rates.items():
            if format_ not in FORMATS:
                raise UsageError(
                    f"device {self.name!r}: flops_per_second has the format {format_!r}. It takes {', '.join(FORMATS)}."
                )
            if not _is_rate(rate):
                raise UsageError(
                    f"device {self.name!r}: flops_per_second[{format_!r}]={rate!r} is not allowed. "
                    "It takes a number above 0."
                )

    def _check(self, key: str, is_allowed: bool, takes: str) -> None:
        if not is_allowed:
            raise UsageError(f"device {self.name!r}: {key}={getattr(self, key)!r} is not allowed. It takes {takes}.")

    def rate(self, format_: str) -> float:
        """Peak FLOPs per second of matrix products in this format.

        What the device has no units for it computes in float32, float64 at half the rate of float32. (Consumer cards
        are far slower in float64.)

        Examples:
            >>> from reactivate.planner.cost.devices import find
            >>> find("V100-32GB").rate("bfloat16") == find("V100-32GB").rate("float32")
            True
        """
        slowdown = 2 if format_ == "float64" else 1
        return self.flops_per_second.get(format_) or self.flops_per_second["float32"] / slowdown

    def seconds(self, flops: float, moved_bytes: float, format_: str = "float32") -> float:
        """Return the seconds of one op: its arithmetic or its traffic, whichever takes longer, and its launch.

        Args:
            flops: of matrix products; a multiplication and an addition are two.
            moved_bytes: read and written.
            format_: of the products' inputs.

        Examples:
            >>> from reactivate.planner.cost.devices import find
            >>> round(find("A100-80GB").seconds(flops=0, moved_bytes=2**30), 6)
            0.000663
        """
        computing = flops / (self.rate(format_) * self.compute_efficiency)
        moving = moved_bytes / (self.bandwidth_bytes_per_second * self.bandwidth_efficiency)
        return max(computing, moving) + self.launch_seconds


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _is_rate(value: Any) -> bool:
    return _is_number(value) and value > 0

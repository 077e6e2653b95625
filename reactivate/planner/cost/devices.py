"""Named devices and their speed, for estimates where nothing can be run on them.

Rates and bandwidths are peaks as their vendors publish them: of dense matrix products, accumulated in float32. (Data
sheets since Hopper print rates with sparsity, which are twice these.) Memory is the published number, of 10^9 bytes; a
driver may report some percent more or less.

What a program reaches of the peaks, and what a launch costs, no data sheet says. The defaults are assumptions: the
products of a training step reach 0.6 of the peak, other ops 0.8 of the bandwidth, copies to the host 0.8 of theirs, and an
op in eager mode costs 5 us.
Whoever has the device should measure these, and describe it in a file (`load`).
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any

from reactivate._text.words import did_you_mean
from reactivate.errors import UsageError
from reactivate.planner.cost.links import Link

__all__ = ["DEVICES", "FORMATS", "DeviceSpec", "find", "load"]

FORMATS = ("float64", "float32", "tfloat32", "bfloat16", "float16", "float8")
"""What a device may have a rate for. "tfloat32" is float32 tensors multiplied in TF32; "float8" is every 8-bit float."""


@dataclass(frozen=True)
class DeviceSpec:
    """The speed and memory of a device.

    Attributes:
        name: what it is called.
        memory_bytes: its memory.
        bandwidth_bytes_per_second: peak of reads and writes of that memory.
        flops_per_second: peak of dense matrix products, by the format of their inputs (`FORMATS`); float32 at least.
        source: where the numbers are from.
        launch_seconds: what an op costs however small it is.
        compute_efficiency: the part of `flops_per_second` that matrix products reach.
        bandwidth_efficiency: the part of `bandwidth_bytes_per_second` that ops reach.
        links: {name of a storage: the way to it}: "host", "disk".

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

        Example:
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

        Example:
            >>> from reactivate.planner.cost.devices import find
            >>> round(find("A100-80GB").seconds(flops=0, moved_bytes=2**30), 6)
            0.000663
        """
        computing = flops / (self.rate(format_) * self.compute_efficiency)
        moving = moved_bytes / (self.bandwidth_bytes_per_second * self.bandwidth_efficiency)
        return max(computing, moving) + self.launch_seconds


def find(name: str) -> DeviceSpec:
    """The device in `DEVICES` of this name, or that a ".json" file describes.

    Case, spaces, hyphens and the vendor's name are of no account. "H100" is the module, H100-SXM.

    Raises:
        UsageError: there is none, or the file cannot be read or used.

    Example:
        >>> from reactivate.planner.cost.devices import find
        >>> find("rtx 4090").name
        'RTX-4090'
    """
    if name.endswith(".json"):
        try:
            return load(name)
        except OSError as error:
            raise UsageError(f"device={name!r}: this file cannot be read: {error.strerror}.") from None
    known = {_plain(device): device for device in DEVICES} | {"h100": "H100-SXM"}
    if _plain(name) in known:
        return DEVICES[known[_plain(name)]]
    raise UsageError(
        f"device={name!r} is not known.{did_you_mean(name, DEVICES, _plain)} There are {', '.join(DEVICES)}. "
        "Another one can be described in a JSON file: reactivate.planner.cost.devices.load(path)."
    )


def load(path: str | os.PathLike[str]) -> DeviceSpec:
    """The device that a JSON file describes: an object whose keys are `DeviceSpec`'s attributes.

    `source` is the file itself unless it says otherwise.

    Raises:
        UsageError: it is no JSON object; or a key is unknown, missing, or has a value that it cannot have.
        OSError: the file cannot be read.
    """
    try:
        given = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise UsageError(f"device file {os.fspath(path)}: not JSON: {error}.") from None
    if not isinstance(given, dict):
        raise UsageError(f"device file {os.fspath(path)}: a {type(given).__name__}. It takes an object with keys.")
    given = {"source": os.fspath(path), **given}
    _check_keys(given, path)
    return DeviceSpec(**{**given, "links": _links_of(given.get("links", {}), path)})


def _links_of(given: Any, path: str | os.PathLike[str]) -> dict[str, Link]:
    keys = {item.name for item in fields(Link)}
    if not isinstance(given, dict) or not all(
        isinstance(item, dict) and item.keys() <= keys for item in given.values()
    ):
        raise UsageError(
            f"device file {os.fspath(path)}: links={given!r} is not allowed. It takes an object of objects with "
            f"{', '.join(item.name for item in fields(Link))}."
        )
    try:
        return {name: Link(**item) for name, item in given.items()}
    except (TypeError, UsageError) as error:
        raise UsageError(f"device file {os.fspath(path)}: links: {error}") from None


def _check_keys(given: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    known = {item.name: item.default is MISSING is item.default_factory for item in fields(DeviceSpec)}
    for key in given:
        if key not in known:
            raise UsageError(
                f"device file {os.fspath(path)}: unknown key {key!r}.{did_you_mean(key, known)} It takes {', '.join(known)}."
            )
    missing = [key for key, is_needed in known.items() if is_needed and key not in given]
    if missing:
        raise UsageError(f"device file {os.fspath(path)}: missing {', '.join(map(repr, missing))}.")


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _is_rate(value: Any) -> bool:
    return _is_number(value) and value > 0


def _plain(name: str) -> str:
    plain = "".join(letter for letter in name.lower() if letter.isalnum())
    for brand in ("nvidia", "geforce", "amd", "instinct"):
        plain = plain.removeprefix(brand)
    return plain


def _gpu(
    name: str,
    gigabytes: int,
    gigabytes_per_second: float,
    source: str,
    host: float | None = None,
    **teraflops_per_second: float,
) -> DeviceSpec:
    rates = {format_: rate * 1e12 for format_, rate in teraflops_per_second.items()}
    links = {} if host is None else {"host": Link(host / 2 * _HOST_EFFICIENCY * 1e9, host / 2 * _HOST_EFFICIENCY * 1e9)}
    return DeviceSpec(name, gigabytes * 10**9, gigabytes_per_second * 1e9, rates, source, links=links)


# The same sheets print what PCI Express carries in both directions together, in 10^9 bytes per second, `host` below: each
# direction has half. Of devices whose sheet has no such number nothing is said. That copies reach 0.8 of it is assumed.
_HOST_EFFICIENCY = 0.8


_A100 = (
    "https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/a100/pdf/"
    "nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf"
)
_A10 = "https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/a10/pdf/a10-datasheet.pdf"
_H100 = "https://resources.nvidia.com/en-us-tensor-core/nvidia-tensor-core-gpu-datasheet"
_H200 = "https://www.nvidia.com/en-us/data-center/h200/"
# An HGX B200 at 1000 W; memory as in a DGX B200, of which others have more.
_B200 = "https://resources.nvidia.com/en-us-blackwell-architecture https://www.nvidia.com/en-us/data-center/dgx-b200/"
_L4 = "https://www.nvidia.com/en-us/data-center/l4/"
_L40S = "https://www.nvidia.com/en-us/data-center/l40s/"
_TURING = (
    "https://images.nvidia.com/aem-dam/en-zz/Solutions/design-visualization/technologies/turing-architecture/"
    "NVIDIA-Turing-Architecture-Whitepaper.pdf"
)
_V100 = "https://images.nvidia.com/content/technologies/volta/pdf/volta-v100-datasheet-update-us-1165301-r5.pdf"
_AMPERE = "https://www.nvidia.com/content/PDF/nvidia-ampere-ga-102-gpu-architecture-whitepaper-v2.pdf"
_ADA = "https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf"
_BLACKWELL = "https://images.nvidia.com/aem-dam/Solutions/geforce/blackwell/nvidia-rtx-blackwell-gpu-architecture.pdf"
_MI250X = "https://www.amd.com/en/products/accelerators/instinct/mi200/mi250x.html"
_MI300X = (
    "https://www.amd.com/content/dam/amd/en/documents/instinct-tech-docs/data-sheets/amd-instinct-mi300x-data-sheet.pdf"
)

# One core at 3 GHz with two 8-lane FMA units (AVX2): 3e9 * 2 * 8 * 2. A core alone reaches about ten outstanding cache
# lines of 64 bytes per 80 ns of latency, less than its socket's bandwidth.
_CPU = DeviceSpec(
    name="cpu",
    memory_bytes=16 * 10**9,
    bandwidth_bytes_per_second=8e9,
    flops_per_second={"float32": 96e9, "float64": 48e9},
    source="assumed: one core at 3 GHz with two AVX2 FMA units, ten cache lines in flight per 80 ns, and 16 GB",
    launch_seconds=2e-6,
)

# fmt: off
_TABLE = (
    _gpu("A100-40GB", 40, 1555, _A100, 64, float64=19.5, float32=19.5, tfloat32=156, bfloat16=312, float16=312),
    _gpu("A100-80GB", 80, 2039, _A100, 64, float64=19.5, float32=19.5, tfloat32=156, bfloat16=312, float16=312),
    _gpu("H100-SXM", 80, 3350, _H100, 128,
         float64=67, float32=67, tfloat32=494.5, bfloat16=989.5, float16=989.5, float8=1979),
    _gpu("H100-PCIe", 80, 2000, _H100, 128,
         float64=51, float32=51, tfloat32=378, bfloat16=756.5, float16=756.5, float8=1513),
    _gpu("H200", 141, 4800, _H200, 128,
         float64=67, float32=67, tfloat32=494.5, bfloat16=989.5, float16=989.5, float8=1979),
    _gpu("B200", 180, 8000, _B200, float64=40, float32=80, tfloat32=1100, bfloat16=2250, float16=2250, float8=4500),
    _gpu("L4", 24, 300, _L4, 64, float32=30.3, tfloat32=60, bfloat16=121, float16=121, float8=242.5),
    _gpu("L40S", 48, 864, _L40S, 64, float32=91.6, tfloat32=183, bfloat16=362.05, float16=362.05, float8=733),
    _gpu("A10", 24, 600, _A10, 64, float32=31.2, tfloat32=62.5, bfloat16=125, float16=125),
    _gpu("T4", 16, 320, _TURING, float32=8.1, float16=65),
    _gpu("V100-32GB", 32, 900, _V100, float64=7.8, float32=15.7, float16=125),
    _gpu("RTX-3090", 24, 936, _AMPERE, float32=35.6, tfloat32=35.6, bfloat16=71, float16=71),
    _gpu("RTX-4090", 24, 1008, _ADA, float32=82.6, tfloat32=82.6, bfloat16=165.2, float16=165.2, float8=330.3),
    _gpu("RTX-5090", 32, 1792, _BLACKWELL, float32=104.8, tfloat32=104.8, bfloat16=209.5, float16=209.5, float8=419),
    # One of the two dies, which is what torch sees as a device: half of the published numbers.
    _gpu("MI250X", 64, 1600, _MI250X, float64=47.85, float32=47.85, bfloat16=191.5, float16=191.5),
    _gpu("MI300X", 192, 5300, _MI300X,
         float64=163.4, float32=163.4, tfloat32=653.7, bfloat16=1307.4, float16=1307.4, float8=2614.9),
    _CPU,
)
# fmt: on

DEVICES: Mapping[str, DeviceSpec] = {device.name: device for device in _TABLE}
"""Devices by name. A100, V100 and H100-SXM are modules, not the PCIe cards; MI250X is one of its two dies."""

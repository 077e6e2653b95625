"""Named devices and their speed, for estimates where nothing can be run on them.

Rates and bandwidths are peaks as their vendors publish them: of dense matrix products, accumulated in float32. (Data
sheets since Hopper print rates with sparsity, which are twice these.) Memory is what torch reports for the device.

Apple's chips are not in the table: there is no published rate of matrix products and the bandwidth of the same chip.

What a program reaches of the peaks, and what a launch costs, no data sheet says. The defaults are assumptions: the
products of a training step reach 0.6 of the peak, other ops 0.8 of the bandwidth, copies to the host 0.8 of theirs, an
op in eager mode costs 5 us, and the engine's own Python what one core at 3 GHz takes for it. Collectives reach 0.8 of what
the links between devices carry, and cost 20 us however small they are.
If you have the device, measure these, and describe it in a file (`load`).
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
        links: {name: the way there}: the storages "host" and "disk", the other devices of its node ("peer"), and those of
            other nodes ("network").
        node_devices: how many devices a node has.
        workspace_bytes: what torch allocates for each library of matrix products, in each thread that calls it.
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
    node_devices: int = 8
    workspace_bytes: int = 0
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
        self._check("node_devices", type(self.node_devices) is int and self.node_devices > 0, "an int above 0")
        is_size = type(self.workspace_bytes) is int and self.workspace_bytes >= 0
        self._check("workspace_bytes", is_size, "an int from 0")
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

    @property
    def link_to_peer(self) -> Link:
        """The way to another device of its node: "peer"; else over PCI Express, "host"; else by its memory, as on a CPU."""
        bandwidth = self.bandwidth_bytes_per_second * self.bandwidth_efficiency
        return self.links.get("peer") or self.links.get("host") or Link(bandwidth, bandwidth, self.launch_seconds)

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


# -- the table --------------------------------------------------------------------------------------------------------

_LINK_EFFICIENCY = 0.8  # assumed: what copies and collectives reach
_COLLECTIVE_SECONDS = 2e-5  # assumed: what a small one takes


def _device_of(
    name: str,
    gibibytes: float,
    gigabytes_per_second: float,
    teraflops_per_second: Mapping[str, float],
    source: str,
    workspace_bytes: int = 0,
    host_gigabytes_per_second: float | None = None,
    peer_gigabytes_per_second: float | None = None,
    network_gigabits_per_second: float | None = None,
    note: str = "",
) -> DeviceSpec:
    """Return a device of `devices.json`.

    Memory is what torch says that a device has: `mem_get_info`, and the "total capacity" of its errors; of TPUs, what XLA's
    errors call the capacity. It is less than the data sheet's number, by what the driver and error correction take. Drivers
    differ by some tenths of a GiB: the table has the least of those that are common. Sheets print what PCI Express carries
    in both directions together, and so for NVLink: each has half. Those of networks have what one card carries in each. Of
    devices whose sheet has no such number nothing is said. Workspaces are torch's defaults, the larger of its two libraries'.
    """
    rates = {format_: rate * 1e12 for format_, rate in teraflops_per_second.items()}
    links: dict[str, Link] = {}
    if host_gigabytes_per_second is not None:
        links["host"] = _link_of(host_gigabytes_per_second / 2)
    if peer_gigabytes_per_second is not None:
        links["peer"] = _link_of(peer_gigabytes_per_second / 2, _COLLECTIVE_SECONDS)
    if network_gigabits_per_second is not None:
        links["network"] = _link_of(network_gigabits_per_second / 8, _COLLECTIVE_SECONDS)
    memory, bandwidth = round(gibibytes * 2**30), gigabytes_per_second * 1e9
    return DeviceSpec(name, memory, bandwidth, rates, source, links=links, workspace_bytes=workspace_bytes)


def _link_of(gigabytes_per_second: float, *tensor_seconds: float) -> Link:
    rate = gigabytes_per_second * _LINK_EFFICIENCY * 1e9
    return Link(rate, rate, *tensor_seconds)


# One core at 3 GHz with two 8-lane FMA units (AVX2): 3e9 * 2 * 8 * 2. A core alone reaches about ten outstanding cache lines
# of 64 bytes per 80 ns of latency, less than its socket's bandwidth.
_CPU = DeviceSpec(
    name="cpu",
    memory_bytes=16 * 2**30,
    bandwidth_bytes_per_second=8e9,
    flops_per_second={"float32": 96e9, "float64": 48e9},
    source="assumed: one core at 3 GHz with two AVX2 FMA units, ten cache lines in flight per 80 ns, and 16 GiB",
    launch_seconds=2e-6,
)

_SHEETS = json.loads(Path(__file__).with_name("devices.json").read_text(encoding="utf-8"))

DEVICES: Mapping[str, DeviceSpec] = {
    **{name: _device_of(name, **sheet) for name, sheet in _SHEETS.items()},
    "cpu": _CPU,
}
"""Devices by name. A100, V100 and H100-SXM are modules, not the PCIe cards. MI250X is one of its two dies, GB200 one of its
two GPUs, Trainium2 two of its eight cores."""


# -- by name, or from a file ---------------------------------------------------------------------------------------------


def find(name: str) -> DeviceSpec:
    """The device in `DEVICES` of this name, or that a ".json" file describes.

    Case, spaces, hyphens and the vendor's name are of no account. "H100" is the module, H100-SXM.

    Raises:
        UsageError: there is none, or the file cannot be read or used.

    Examples:
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
    if _plain(name) == "gpu":
        raise UsageError(
            "device='gpu': write 'cuda' for a GPU of this machine, or its name ('H100-SXM') for another one."
        )
    raise UsageError(
        f"device={name!r} is not known.{did_you_mean(name, DEVICES, _plain)} There are {', '.join(DEVICES)}. "
        'Another one can be described in a JSON file: device="my_device.json".'
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
    links = given.get("links", {})
    if not isinstance(links, dict):
        raise UsageError(
            f"device file {os.fspath(path)}: links={links!r} is not allowed. It takes an object of objects."
        )
    given["links"] = {name: _part_of(Link, f"links[{name!r}]", item, path) for name, item in links.items()}
    given["overhead"] = _part_of(Overhead, "overhead", given.get("overhead", {}), path)
    return DeviceSpec(**given)


def _part_of(kind: Any, name: str, given: Any, path: str | os.PathLike[str]) -> Any:
    """Return the `Link` or the `Overhead` that an object of the file describes."""
    keys = [item.name for item in fields(kind)]
    if not isinstance(given, dict) or not given.keys() <= set(keys):
        raise UsageError(
            f"device file {os.fspath(path)}: {name}={given!r} is not allowed. It takes an object with {', '.join(keys)}."
        )
    try:
        return kind(**given)
    except (TypeError, UsageError) as error:
        raise UsageError(f"device file {os.fspath(path)}: {name}: {error}") from None


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


def _plain(name: str) -> str:
    plain = "".join(letter for letter in name.lower() if letter.isalnum())
    for brand in ("nvidia", "geforce", "amd", "instinct"):
        plain = plain.removeprefix(brand)
    return plain

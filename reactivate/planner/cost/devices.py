"""Named devices and their speed, for estimates where nothing can be run on them.

Rates and bandwidths are peaks as their vendors publish them: of dense matrix products, accumulated in float32. (Data
sheets since Hopper print rates with sparsity, which are twice these.) Memory is what torch reports for the device.

Apple's chips are not in the table: nobody publishes a rate of matrix products and the bandwidth of the same chip.

What a program reaches of the peaks, and what a launch costs, no data sheet says. The defaults are assumptions: the
products of a training step reach 0.6 of the peak, other ops 0.8 of the bandwidth, copies to the host 0.8 of theirs, an
op in eager mode costs 5 us, and the engine's own Python what one core at 3 GHz takes for it.
Whoever has the device should measure these, and describe it in a file (`load`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from reactivate._text.words import did_you_mean
from reactivate.errors import UsageError
from reactivate.planner.cost.device_spec import FORMATS, DeviceSpec
from reactivate.planner.cost.device_table import DEVICES
from reactivate.planner.cost.links import Link
from reactivate.planner.cost.overhead import Overhead

__all__ = ["DEVICES", "FORMATS", "DeviceSpec", "find", "load"]


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
    given["links"] = _links_of(given.get("links", {}), path)
    given["overhead"] = _overhead_of(given.get("overhead", {}), path)
    return DeviceSpec(**given)


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


def _overhead_of(given: Any, path: str | os.PathLike[str]) -> Overhead:
    keys = [item.name for item in fields(Overhead)]
    if not isinstance(given, dict) or not given.keys() <= set(keys):
        raise UsageError(
            f"device file {os.fspath(path)}: overhead={given!r} is not allowed. It takes an object with {', '.join(keys)}."
        )
    try:
        return Overhead(**given)
    except UsageError as error:
        raise UsageError(f"device file {os.fspath(path)}: {error}") from None


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

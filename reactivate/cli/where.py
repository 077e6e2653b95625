"""The place of a target: a device that is here, or a simulation of one that is not."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from reactivate.errors import UsageError
from reactivate.planner.cost.devices import DeviceSpec, find
from reactivate.planner.target import torch_device


@dataclass(frozen=True)
class Where:
    """The place where a target runs.

    Attributes:
        device: what it is moved to; None: it stays where it is made.
        spec: the device that is simulated; None: none is.
        on_meta: whether nothing can run there, so that nothing needs memory.
    """

    device: torch.device | None = None
    spec: DeviceSpec | None = None
    on_meta: bool = False


def where_of(name: str | None, on_meta: bool) -> Where:
    """Return the place that `--device` and `--meta` name.

    Args:
        name: a device of torch ("cuda"), one of the table ("H100-SXM"), or a file that describes one ("mine.json").
        on_meta: whether nothing is to have memory.

    Raises:
        UsageError: there is no such device.

    Examples:
        >>> from reactivate.cli.where import where_of
        >>> where_of("L40S", on_meta=False).on_meta
        True
    """
    if name is None:
        return Where(on_meta=on_meta)
    device = torch_device(name)
    if device is None:
        spec, here = find(name), _accelerator_here()
        if here is None or here[1] != spec or on_meta:
            return Where(spec=spec, on_meta=True)
        return Where(here[0])
    if device.type == "meta":
        return Where(on_meta=True)
    device_here(name)
    if not on_meta:
        return Where(device)
    here = _accelerator_here() if device.type != "cpu" else None
    return Where(spec=here[1] if here else find("cpu"), on_meta=True)


def device_here(name: str | None) -> torch.device | None:
    """A device on which something can run now; None for None.

    Raises:
        UsageError: it is not here.
    """
    if name is None:
        return None
    device = torch_device(name)
    try:
        if device is not None and device.type != "meta":
            torch.empty(0, device=device)
            return device
    except (AssertionError, NotImplementedError, RuntimeError):
        pass
    raise UsageError(
        f"--device {name}: nothing can run there from here. To plan for a device that is elsewhere, name it: `reactivate "
        "plan ... --device H100-SXM`; `reactivate devices` lists them."
    )


def _accelerator_here() -> tuple[torch.device, DeviceSpec] | None:
    if not torch.cuda.is_available():
        return None
    try:
        return torch.device("cuda"), find(torch.cuda.get_device_name())
    except UsageError:
        return None

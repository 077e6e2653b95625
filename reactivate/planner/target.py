"""The place of a planned step: here, or on a device that only a table knows."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import Module

from reactivate._inspect.fake import has_no_memory, tensors_of
from reactivate.errors import UnsupportedError, UsageError
from reactivate.planner.budget import RESERVED, Budget, parse
from reactivate.planner.cost.devices import DeviceSpec, find

RESERVE = 0.05  # of the free memory: what steps that are tried leave free


@dataclass(frozen=True)
class Target:
    """The place where a step runs.

    Attributes:
        device: of its tensors.
        spec: the roofline of ops that were not measured.
        is_here: whether it can run.
        memory_bytes: the memory of the device, all of it; 0 if unknown.
        has_values: whether the tensors of the step have values, here or elsewhere.
        reserve: the part of an accelerator's memory that a default budget leaves free.
        margin: the part by which memory may be larger whose size depends on the data of the step.
    """

    device: torch.device
    spec: DeviceSpec
    is_here: bool
    memory_bytes: int = 0
    has_values: bool = True
    reserve: Budget = field(default_factory=lambda: parse(RESERVED))
    margin: Fraction = Fraction(0)

    @property
    def is_host(self) -> bool:
        """Return whether the memory is the host's."""
        return self.device.type == "cpu" and self.spec.name == "cpu"

    def capacity_bytes(self, fixed_bytes: int, *, is_predicted: bool) -> int:
        """Return what is free on the device, and what the step has there already."""
        if is_predicted:
            return self.spec.memory_bytes
        # What the allocator has reserved and no tensor has counts as free.
        cached = torch.accelerator.memory_reserved(self.device) - torch.accelerator.memory_allocated(self.device)
        return available_bytes(self.device) + int(cached) + fixed_bytes

    def free_bytes(self, fixed_bytes: int, *, is_predicted: bool) -> int:
        """Return the same, less the reserve: of all memory where nothing runs, else of what is free."""
        whole = self.capacity_bytes(fixed_bytes, is_predicted=is_predicted)
        return whole - self.reserve.total(0, whole if is_predicted else whole - fixed_bytes)

    @property
    def rounding(self) -> int:
        """The allocator gives multiples of this many bytes: those of accelerators 512."""
        return 1 if self.is_host else 512


def find_target(
    model: Module, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device | str | DeviceSpec | None
) -> Target:
    """Return the place where a model is, or is said to be.

    Raises:
        UsageError: it is elsewhere, or no such device is known.
        UnsupportedError: it is on XLA, or on a device whose allocator tells no numbers.
    """
    tensors = tensors_of(model, args, kwargs)
    parameter = next(iter(model.parameters()), None)
    own = torch.device("cpu") if parameter is None or parameter.is_meta else parameter.device
    if own.type == "xla":
        raise UnsupportedError(
            f"plan: the model is on {own}, where all ops are compiled as one program: no time or memory of a single op can "
            "be measured. Plan a copy on the CPU or on the meta device for a device by name (`reactivate devices`), and "
            "apply the plan to the model on XLA."
        )
    has_values = not any(map(has_no_memory, tensors))
    if isinstance(device, DeviceSpec):
        return Target(own, device, False, device.memory_bytes, has_values)
    if isinstance(device, str) and torch_device(device) is None:
        spec = find(device)
        return Target(own, spec, False, spec.memory_bytes, has_values)
    wanted = own if device is None else _torch_device(device)
    if wanted.type != own.type:
        raise UsageError(
            f"plan(device={device!r}): the model is on {own}. Move it there first, or name a device that is not here "
            "('H100-SXM', see `reactivate devices`) to plan for it."
        )
    if has_values and own.type != "cpu":
        _require_counts(own)
    return Target(own, device_spec(own), has_values, memory_bytes(own) if has_values else 0, has_values)


def _require_counts(device: torch.device) -> None:
    try:
        torch.accelerator.memory_allocated(device)
    except (RuntimeError, AttributeError) as error:
        raise UnsupportedError(
            f"plan: the model is on {device}, whose allocator does not tell torch how many bytes it has given out "
            "(torch.accelerator.memory_allocated fails), so no op can be measured there. Plan a copy on the CPU or on the "
            "meta device for a device by name (`reactivate devices`), and apply the plan to the model."
        ) from error


def _torch_device(device: Any) -> torch.device:
    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise UsageError(
            f"plan(device={device!r}): torch knows no such device here ({error}). Write the type and number of one of this "
            "machine, 'cuda:0', or name a device that is not here ('H100-SXM', see `reactivate devices`)."
        ) from None


def torch_device(name: str) -> torch.device | None:
    """Return the device that torch has under a name, here or not; None if it knows none."""
    try:
        return torch.device(name)
    except RuntimeError:
        return None


def device_spec(device: torch.device) -> DeviceSpec:
    """The roofline of a device that is here, where it is in the table: else that of a CPU, of which only ratios count."""
    if device.type == "cuda" and torch.cuda.is_available():
        try:
            return find(torch.cuda.get_device_name(device))
        except UsageError:
            pass
    return find("cpu")


def available_bytes(device: torch.device) -> int:
    """The memory of a device that is free now. If unknown, more than there can be."""
    return _free_and_total(device)[0]


def memory_bytes(device: torch.device) -> int:
    """The memory of a device, all of it; for a CPU that of the machine. 0 if unknown."""
    return _free_and_total(device)[1]


def _free_and_total(device: torch.device) -> tuple[int, int]:
    if device.type != "cpu":
        ask = getattr(torch.get_device_module(device), "mem_get_info", None)
        if ask is None:
            return _UNKNOWN
        free, total = ask(device)
        return int(free), int(total)
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return _UNKNOWN
    sizes = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
    return sizes["MemAvailable"] * 1024, sizes["MemTotal"] * 1024


_UNKNOWN = sys.maxsize, 0


def is_alone() -> bool:
    """Return whether no other rank waits for the collectives that run here."""
    return not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1)

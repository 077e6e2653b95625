"""Measuring sections, and what comes out: rows of figures, with the machine and the settings that they hold for."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from _figures import METHODS, SINGLE, WARM, Array, Estimate, Method, Times, View, estimate, verdict
from _measure import Tick, Timer, quiet, single_calls, warm_batches
from _sections import Quantity, Section, Subjects
from _subjects import ALL_OURS, PLAIN, TORCH, differs_from_plain, make_subjects, version_of_remat
from _workloads import ten_modules

Track = Callable[[str, int], Tick]
"""(what begins, its number of rounds) -> what is to be called after each of them."""


@dataclass(frozen=True)
class Settings:
    """Settings: how long to measure.

    Attributes:
        rounds: of warm batches.
        batch_seconds: the length of a batch.
        calls: rounds of single calls.
        clock: "cpu" or "wall".
    """

    rounds: int = 120
    batch_seconds: float = 0.006  # short, so that on a busy machine some batches are left alone
    calls: int = 2000
    clock: str = "cpu"


FEWEST_ROUNDS = 15
QUICK = Settings(rounds=30, batch_seconds=0.003, calls=300)


@dataclass(frozen=True)
class Row:
    """One figure of one subject by one method.

    Attributes:
        of_torch: the part that it is of torch non-reentrant's figure; None where the figure is a ratio already.
        target: what the last of the two may be at most; None where there is no target.
        verdict: "met", "missed" or "within noise", by the interval.
    """

    section: str
    quantity: str
    subject: str
    method: str
    unit: str
    figure: Estimate
    of_torch: Estimate | None
    target: float | None
    verdict: str | None


@dataclass(frozen=True)
class Results:
    """The results of the benchmark.

    Attributes:
        machine: device, versions and how Python was set up.
        differences: {subject: what one step of the ten-module block leaves different from plain, bit for bit}.
    """

    machine: dict[str, str | int | None]
    settings: Settings
    differences: dict[str, list[str]]
    rows: list[Row]

    @property
    def name(self) -> str:
        """Of the files: device and version of torch."""
        device = "cpu" if self.machine["device"] == "cpu" else str(self.machine["device name"]).replace(" ", "-")
        public = "-public" if self.machine.get("names of torch") == "public" else ""
        return f"overhead-{device}-torch{str(self.machine['torch']).partition('+')[0]}{public}"

    def to_json(self) -> str:
        methods = {method.name: method.describe for method in METHODS}
        return json.dumps({**asdict(self), "methods": methods}, indent=1, ensure_ascii=False) + "\n"


def silent(description: str, rounds: int) -> Tick:
    """A `Track` that shows nothing."""
    return lambda: None


def measure(sections: Iterable[Section], settings: Settings, device: torch.device, track: Track = silent) -> Results:
    """Every section by both methods."""
    torch.manual_seed(0)
    subjects = make_subjects()
    rows = [row for section in sections for row in _measure_section(section, subjects, settings, device, track)]
    differences = {
        name: differs_from_plain(wrap, partial(ten_modules, device)) for name, wrap in subjects.items() if name != PLAIN
    }
    return Results(describe_machine(device), settings, differences, rows)


def _measure_section(
    section: Section, subjects: Subjects, settings: Settings, device: torch.device, track: Track
) -> Iterator[Row]:
    steps = section.make_steps(subjects, device)
    timer = Timer(device, settings.clock)
    rounds = min(settings.rounds, max(FEWEST_ROUNDS, settings.rounds // section.heavy))
    calls = max(2, settings.calls // section.heavy)
    with quiet():
        tick = track(f"{section.name}, {WARM.name}", rounds)
        warm = warm_batches(steps, rounds, settings.batch_seconds, timer, tick)
        tick = track(f"{section.name}, {SINGLE.name}", calls)
        single = single_calls(steps, calls, timer, tick)
    for quantity in section.quantities:
        for subject in quantity.subjects:
            if subject in subjects:
                yield make_row(section.name, quantity, subject, WARM, warm)
                yield make_row(section.name, quantity, subject, SINGLE, single)


def make_row(section: str, quantity: Quantity, subject: str, method: Method, times: Times) -> Row:
    """A subject's figure from the times of a section."""

    def figure(view: View) -> Array:
        return quantity.figure(view, subject)

    def ratio(view: View) -> Array:
        return quantity.figure(view, subject) / quantity.figure(view, TORCH)

    value, of_torch = estimate(figure, times, method), None
    if quantity.unit == "µs":
        value, of_torch = value.scaled(1e6), estimate(ratio, times, method)
    target = quantity.targets.get(method.name) if subject in ALL_OURS else None
    judged = None if target is None else verdict(of_torch or value, target)
    return Row(section, quantity.name, subject, method.name, quantity.unit, value, of_torch, target, judged)


def describe_machine(device: torch.device) -> dict[str, str | int | None]:
    """Describe what the figures hold for."""
    return {
        "device": device.type,
        "device name": torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name(),
        "cpu": cpu_name(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch_remat": version_of_remat(),
        "names of torch": "public" if "public_ways" in sys.modules else "private where they are faster",
        "threads": 1,
        "garbage collector": "enabled; what was alive before is frozen",
    }


def cpu_name() -> str:
    """As Linux knows it; elsewhere what Python does."""
    facts = Path("/proc/cpuinfo")
    lines = facts.read_text().splitlines() if facts.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()

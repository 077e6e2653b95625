"""Results of the benchmark on XLA, as plain values; one file."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from _results import Track, cpu_name, silent
from _xla_case import Case, measured
from _xla_dump import Compiled, Program
from _xla_models import MODELS, Size
from _xla_ways import NONE, OURS, TORCH_XLA, WAYS

OF_TORCH_XLAS = 1.2
"""What the temp may be at most, as a part of that with torch_xla's own function."""

UNKEPT = (NONE, OURS)
"""The ways that are measured a second time, with XLA:CPU dropping barriers early as it is built to."""


@dataclass(frozen=True)
class Verdict:
    """A target, and what was found.

    Attributes:
        ratio: of the temps, rounded to what the page shows.
        target: what it may be at most.
    """

    model: str
    against: str
    ratio: float
    target: float

    @property
    def words(self) -> str:
        return "met" if self.ratio <= self.target else "missed"


@dataclass(frozen=True)
class Results:
    """The findings of the benchmark.

    Attributes:
        machine: the processor, and versions.
        sizes: {model: its size}.
    """

    machine: dict[str, str | int | None]
    sizes: dict[str, Size]
    cases: list[Case]

    @property
    def name(self) -> str:
        """Of the file: device and version of torch."""
        return f"xla-cpu-torch{str(self.machine['torch']).partition('+')[0]}"

    def case(self, model: str, way: str, keeps_barriers: bool = True) -> Case | None:
        wanted = (model, way, keeps_barriers)
        return next((case for case in self.cases if (case.model, case.way, case.keeps_barriers) == wanted), None)

    def ratio(self, case: Case, way: str = NONE) -> float | None:
        """The temp as a part of that of another way of the same model; None where that was not measured."""
        other = self.case(case.model, way, case.keeps_barriers)
        return None if other is None else case.compiled.temp_bytes / other.compiled.temp_bytes

    def verdicts(self) -> Iterator[Verdict]:
        """Every target, of what was measured."""
        for model in self.sizes:
            ours = self.case(model, OURS)
            for against, target in ((NONE, MODELS[model].target), (TORCH_XLA, OF_TORCH_XLAS)):
                ratio = None if ours is None else self.ratio(ours, against)
                if ratio is not None:
                    yield Verdict(model, against, round(ratio, 3), target)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1, ensure_ascii=False) + "\n"


def measure(
    models: Iterable[str], ways: Iterable[str], sizes: dict[str, Size] | None = None, track: Track = silent
) -> Results:
    """Every model in every way, each in a process of its own."""
    chosen = {name: (sizes or {}).get(name, MODELS[name].size) for name in models}
    plan = [(way, True) for way in WAYS if way in ways] + [(way, False) for way in UNKEPT if way in ways]
    machine: dict[str, str | int | None] = {
        "device": "cpu",
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
    }
    cases = []
    for model, size in chosen.items():
        tick = track(model, len(plan))
        for way, keeps_barriers in plan:
            case, versions = measured(model, way, size, keeps_barriers)
            cases.append(case)
            machine |= versions
            tick()
    return Results(machine, chosen, cases)


def read(path: Path) -> Results:
    """Read what `Results.to_json` wrote."""
    found = json.loads(path.read_text(encoding="utf-8"))
    sizes = {name: Size(**{**size, "rows": tuple(size["rows"])}) for name, size in found["sizes"].items()}
    return Results(found["machine"], sizes, [_case(**case) for case in found["cases"]])


def _case(traced: dict[str, int], compiled: dict[str, int], **others: object) -> Case:
    make: Callable[..., Case] = Case
    return make(traced=Program(**traced), compiled=Compiled(**compiled), **others)

"""Results of the benchmark of selective checkpointing, as plain values."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from _figures import METHODS, Estimate
from _results import Settings as BlockSettings

BLOCK, LARGE, EXPERIMENT = PARTS = ("block", "large", "experiment")

OVER_PLAIN, OF_TORCH, OF_REMAT = "over plain", "of torch's", "of torch_remat's"
OVER_IDEAL = "over the ideal"


@dataclass(frozen=True)
class Settings:
    """Settings: how long to measure, and what.

    Attributes:
        block: of the small block.
        large_width, large_length, large_calls: of the large block: features, tokens, rounds of single calls.
        layers, dim, heads, context: of the experiment's model.
        batch: of the experiment, where each way has the same; the budget is the plain step's peak at half of it.
        experiment_calls: rounds of the experiment.
        clock: "cpu" or "wall"; on an accelerator, the large block and the experiment have "wall" always.
    """

    block: BlockSettings = field(default_factory=lambda: BlockSettings(batch_seconds=0.03))
    large_width: int = 1024
    large_length: int = 512
    large_calls: int = 30
    layers: int = 12
    dim: int = 192
    heads: int = 6
    context: int = 128
    batch: int = 8
    experiment_calls: int = 15
    clock: str = "cpu"


QUICK = Settings(
    block=BlockSettings(rounds=10, batch_seconds=0.002, calls=20),
    large_width=128,
    large_length=64,
    large_calls=10,
    layers=6,
    dim=32,
    heads=2,
    context=32,
    experiment_calls=3,
)


@dataclass(frozen=True)
class Row:
    """One figure of one way to checkpoint a block, by one method.

    Attributes:
        quantity: `OVER_PLAIN` in µs, the others as ratios.
        keeps: the calls whose results the way keeps.
        target: what the figure may be at most; None where there is no target.
        verdict: "met", "missed" or "within noise", by the interval.
    """

    part: str
    quantity: str
    system: str
    keeps: str
    method: str
    figure: Estimate
    target: float | None = None
    verdict: str | None = None


@dataclass(frozen=True)
class Kept:
    """The bytes that the forward pass of a way leaves for the backward.

    Attributes:
        kept_bytes: of activations, as autograd and the systems hold them, the argument of the block among them.
        allocated_bytes: by the forward pass, whoever holds it: without the argument, with the block's result and states
            of random number generators.
    """

    part: str
    system: str
    keeps: str
    kept_bytes: int
    allocated_bytes: int


@dataclass(frozen=True)
class Point:
    """A step of the model by one way.

    Attributes:
        mode: what is recomputed.
        peak_bytes: allocated at the step's peak, over what was allocated before it.
        seconds: of the step: the median over the rounds.
        tokens_per_second: of the same rounds.
    """

    system: str
    mode: str
    batch: int
    peak_bytes: int
    seconds: Estimate
    tokens_per_second: Estimate


@dataclass(frozen=True)
class Experiment:
    """Every mode of every system on one model.

    Attributes:
        parameters: how many the model has.
        budget_bytes: what the peaks of `at_equal_memory` stay below, with the largest batches that do.
        differences: {way: what its step leaves different from plain, bit for bit}.
    """

    parameters: int
    budget_bytes: int
    at_equal_batch: list[Point]
    at_equal_memory: list[Point]
    differences: dict[str, list[str]]


@dataclass(frozen=True)
class Results:
    """The findings, of the parts that were measured.

    Attributes:
        machine: device, versions and how Python was set up.
        differences: {part: {way: what one step leaves different from plain, bit for bit}}.
    """

    machine: dict[str, str | int | None]
    settings: Settings
    rows: list[Row] = field(default_factory=list)
    kept: list[Kept] = field(default_factory=list)
    differences: dict[str, dict[str, list[str]]] = field(default_factory=dict)
    experiment: Experiment | None = None

    @property
    def name(self) -> str:
        """Of the files: device and version of torch."""
        device = "cpu" if self.machine["device"] == "cpu" else str(self.machine["device name"]).replace(" ", "-")
        return f"selective-{device}-torch{str(self.machine['torch']).partition('+')[0]}"

    def to_json(self) -> str:
        return json.dumps({**asdict(self), "methods": self.methods()}, indent=1, ensure_ascii=False) + "\n"

    def methods(self) -> dict[str, str]:
        """{name of a method: what it does}."""
        return {method.name: method.describe for method in METHODS}


def read(path: Path) -> Results:
    """The results in a JSON file that `Results.to_json` wrote."""
    found = json.loads(path.read_text(encoding="utf-8"))
    settings = found["settings"]
    experiment = found["experiment"]
    return Results(
        machine=found["machine"],
        settings=Settings(**{**settings, "block": BlockSettings(**settings["block"])}),
        rows=[_made(Row, row) for row in found["rows"]],
        kept=[Kept(**kept) for kept in found["kept"]],
        differences=found["differences"],
        experiment=None if experiment is None else _experiment(experiment),
    )


def _experiment(found: dict[str, Any]) -> Experiment:
    points = ("at_equal_batch", "at_equal_memory")
    return Experiment(**{**found, **{name: [_made(Point, point) for point in found[name]] for name in points}})


def _made(kind: Any, found: dict[str, Any]) -> Any:
    estimates = {item.name for item in fields(kind) if item.type == "Estimate"}
    return kind(**{name: Estimate(**value) if name in estimates else value for name, value in found.items()})

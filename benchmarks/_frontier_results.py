"""Results of the benchmark of plans, as plain values; a file for each model."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from _figures import SINGLE, Estimate
from _frontier_models import Size

FASTER, SAME, SLOWER, NO_PLAN = "faster", "not separable", "slower", "no plan fits"


@dataclass(frozen=True)
class Settings:
    """Settings: how long to measure, and what.

    Attributes:
        seconds: of rounds, for a model.
        fewest, most: rounds, whatever the seconds.
        backend: of compiled peers.
        compiled: the models with compiled peers.
        clock: "cpu" or "wall"; on an accelerator always "wall".
        sizes: by model; of models that are not in there as the script has them.
    """

    seconds: float = 150.0
    fewest: int = 7
    most: int = 40
    backend: str = "inductor"
    compiled: tuple[str, ...] = ()
    clock: str = "cpu"
    sizes: dict[str, Size] = field(default_factory=dict)


@dataclass(frozen=True)
class Peer:
    """A step of the model as others have it.

    Attributes:
        peak_bytes: the most that is allocated, over parameters, gradients and inputs.
        seconds: the median over the rounds.
        first_seconds: on the wall, of the first step: with what is compiled in it.
        differences: what a step leaves different from plain, bit for bit.
    """

    system: str
    mode: str
    is_compiled: bool
    peak_bytes: int
    seconds: Estimate
    first_seconds: float
    differences: list[str]

    @property
    def name(self) -> str:
        return f"{self.system}: {self.mode}"


@dataclass(frozen=True)
class Planned:
    """A step of the model with a plan. Sizes are over parameters, gradients and inputs.

    Attributes:
        system: whether it runs eagerly, or what of it is compiled.
        label: the budget in words.
        step: the name of what was measured: budgets with the same plan share one.
        budget_bytes: what was allowed.
        promised_bytes, promised_seconds: what the plan says.
        peak_bytes, seconds, differences: what was found, as in `Peer`.
        holds: whether the peak is within the budget.
        does: {what is done: with how many parts of the model}.
    """

    system: str
    label: str
    step: str
    budget_bytes: int
    promised_bytes: int
    promised_seconds: float
    peak_bytes: int
    seconds: Estimate
    holds: bool
    does: dict[str, int]
    differences: list[str]


@dataclass(frozen=True)
class Verdict:
    """A plan against the fastest peer, in equal memory.

    Attributes:
        budget_of: the peer whose peak is the budget.
        rival: the fastest peer whose peak is within it.
        system: how the plan for it runs: the fastest way that stays within it.
        ratio: the plan's time as a part of the rival's; None where no plan fits.
        words: "faster", "not separable" or "slower", by the interval; or "no plan fits".
        holds: whether the plan's step stays within the budget; None where no plan fits.
    """

    budget_of: str
    budget_bytes: int
    rival: str
    system: str
    ratio: Estimate | None
    words: str
    holds: bool | None


@dataclass(frozen=True)
class Optimum:
    """The solver against every choice that there is, on the measured chain of a small model of the same kind.

    Attributes:
        blocks: of that chain.
        choices: how many there are.
        budgets: how many were solved: each at which a faster choice begins to fit.
        equal: at how many of them the solver's time is the least that there is, to the last bit.
        worst: the largest part by which it is above that.
    """

    blocks: int
    choices: int
    budgets: int
    equal: int
    worst: float


@dataclass(frozen=True)
class Frontier:
    """The findings on one model.

    Attributes:
        fixed_bytes: parameters, buffers, gradients and inputs.
        least_bytes: the least budget for which there is a plan, over these.
        planning_seconds, replanning_seconds: on the wall: of the first plan, and of each further one in the median.
        verdicts: eager peers and eager plans alone.
        verdicts_with_compiled: every peer and every plan; empty where none was compiled.
        sac_ilp: why `torch.distributed._tools.sac_ilp` is not among the peers.
    """

    machine: dict[str, str | int | None]
    settings: Settings
    model: str
    title: str
    parameters: int
    rounds: int
    fixed_bytes: int
    least_bytes: int
    planning_seconds: float
    replanning_seconds: float
    peers: list[Peer]
    planned: list[Planned]
    verdicts: list[Verdict]
    verdicts_with_compiled: list[Verdict]
    optimum: Optimum
    sac_ilp: list[str]

    @property
    def name(self) -> str:
        """Of the files: model, device and version of torch."""
        device = "cpu" if self.machine["device"] == "cpu" else str(self.machine["device name"]).replace(" ", "-")
        return f"frontier-{self.model}-{device}-torch{str(self.machine['torch']).partition('+')[0]}"

    def to_json(self) -> str:
        return json.dumps({**asdict(self), "method": SINGLE.describe}, indent=1, ensure_ascii=False) + "\n"


def read(path: Path) -> Frontier:
    """Read what `Frontier.to_json` wrote."""
    found = json.loads(path.read_text(encoding="utf-8"))
    del found["method"]
    settings = found["settings"]
    settings["sizes"] = {name: Size(**size) for name, size in settings["sizes"].items()}
    settings["compiled"] = tuple(settings["compiled"])
    found |= {
        "settings": Settings(**settings),
        "peers": [_made(Peer, item) for item in found["peers"]],
        "planned": [_made(Planned, item) for item in found["planned"]],
        "optimum": Optimum(**found["optimum"]),
    }
    for name in ("verdicts", "verdicts_with_compiled"):
        found[name] = [_made(Verdict, item) for item in found[name]]
    return Frontier(**found)


def _made(kind: Any, found: dict[str, Any]) -> Any:
    estimates = {item.name for item in dataclasses.fields(kind) if str(item.type).startswith("Estimate")}
    return kind(**{name: Estimate(**value) if name in estimates and value else value for name, value in found.items()})

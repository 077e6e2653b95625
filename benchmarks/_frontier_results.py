"""The findings on one model: peers and plans, and who is faster in equal memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from _frontier_steps import Optimum
from _presentation import Record
from _timing import SINGLE, Estimate, Key, Times, estimate
from _training import Size

FASTER, SAME, SLOWER, NO_PLAN = "faster", "not separable", "slower", "no plan fits"


@dataclass(frozen=True)
class Settings:
    """Settings: how long to measure, and what.

    Attributes:
        seconds: the most that rounds take, for a model.
        fewest, most: rounds, whatever the seconds.
        width: of an interval: rounds end when none of the verdicts has a wider one.
        backend: of compiled peers.
        compiled: the models with compiled peers.
        clock: "cpu" or "wall"; on an accelerator always "wall".
        sizes: by model; of models that are not in there as the script has them.
        by_block: whether each block is compiled, in every way; plans are made for that.
    """

    seconds: float = 300.0
    fewest: int = 7
    most: int = 400
    width: float = 0.03
    backend: str = "inductor"
    compiled: tuple[str, ...] = ()
    clock: str = "cpu"
    sizes: dict[str, Size] = field(default_factory=dict)
    by_block: bool = False


@dataclass(frozen=True)
class Peer:
    """A step of the model as others have it.

    Attributes:
        peak_bytes: the most that is allocated, over parameters, gradients and inputs.
        seconds: the median over the rounds.
        first_seconds: on the wall, of the first step: with what is compiled in it.
        differences: what a step leaves different from plain, bit for bit; by block: from the compiled plain step.
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
class PlanContents:
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
class Frontier(Record):
    """The findings on one model.

    Attributes:
        fixed_bytes: parameters, buffers, gradients and inputs.
        least_bytes: the least budget for which there is a plan, over these.
        planning_seconds, replanning_seconds: on the wall: of the first plan, and of each further one in the median.
        verdicts: eager peers and eager plans alone.
        verdicts_with_compiled: every peer and every plan; empty where none was compiled.
    """

    explained = {"method": SINGLE.describe}  # noqa: RUF012
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
    planned: list[PlanContents]
    verdicts: list[Verdict]
    verdicts_with_compiled: list[Verdict]
    optimum: Optimum

    @property
    def benchmark(self) -> str:  # type: ignore[override]
        """The first part of the names of its files."""
        return f"frontier-{self.model}{'-by-block' if self.settings.by_block else ''}"


# -- verdicts ---------------------------------------------------------------------------------------------------------


def verdicts(peers: Sequence[Peer], planned: Sequence[PlanContents], times: Times) -> Iterator[Verdict]:
    """At the peak of each of these peers the fastest of them that fits in there, and the plan for that budget."""
    for peer in peers:
        fitting = [other for other in peers if other.peak_bytes <= peer.peak_bytes]
        rival = min(fitting, key=lambda other: other.seconds.value)
        ours = [item for item in planned if item.label == peer.name]
        if not ours:
            yield Verdict(peer.name, peer.peak_bytes, rival.name, "", None, NO_PLAN, None)
            continue
        step = min(ours, key=lambda item: (not item.holds, item.seconds.value))
        ratio = ratio_of((step.step, 1), (rival.name, 1), times)
        yield Verdict(peer.name, peer.peak_bytes, rival.name, step.system, ratio, in_words(ratio), step.holds)


def ratio_of(ours: Key, theirs: Key, times: Times) -> Estimate:
    """Of two times in the same rounds: one, and the median of the paired differences as a part of theirs."""
    return estimate(lambda view: 1 + view.over(ours, theirs) / view.level(theirs), times, SINGLE)


def in_words(ratio: Estimate) -> str:
    """Say what the interval says."""
    return FASTER if ratio.high < 1 else SLOWER if ratio.low > 1 else SAME

"""Counts of a campaign, as text and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fuzz.judge import CRASHED, DISCARDED, ESCAPED, REFUSED, RIGHT, SILENT, Verdict
from fuzz.program import Program
from fuzz.source import source_of


@dataclass
class Refusals:
    """Refusals of one kind.

    Attributes:
        first: the first seed.
        torch: how well torch's checkpoint does on these programs.
    """

    first: int
    torch: Counter[str] = field(default_factory=Counter)
    example: int | None = None

    def add(self, seed: int, verdict: Verdict) -> None:
        """Count one."""
        self.torch[verdict.torch] += 1
        if verdict.fails and self.example is None:
            self.example = seed


@dataclass
class Summary:
    """Counts of a campaign.

    Attributes:
        with_regions, with_recomputations: right programs of which some call was a region, and was recomputed.
        measured, smaller: right programs whose saved bytes were measured, and those that saved fewer than plain.
    """

    outcomes: Counter[str] = field(default_factory=Counter)
    discarded: Counter[str] = field(default_factory=Counter)
    refusals: dict[str, Refusals] = field(default_factory=dict)
    silent: dict[str, list[int]] = field(default_factory=dict)
    crashed: dict[str, list[int]] = field(default_factory=dict)
    with_regions: int = 0
    with_recomputations: int = 0
    regions: int = 0
    recomputations: int = 0
    measured: int = 0
    smaller: int = 0
    seconds: float = 0.0

    def add(self, seed: int, verdict: Verdict) -> None:
        """Count one program."""
        self.outcomes[verdict.outcome] += 1
        if verdict.outcome in DISCARDED:
            self.discarded[f"{verdict.outcome}: {verdict.kind}" if verdict.kind else verdict.outcome] += 1
        elif verdict.outcome == REFUSED:
            self.refusals.setdefault(verdict.kind, Refusals(seed)).add(seed, verdict)
        elif verdict.outcome == SILENT:
            self.silent.setdefault(verdict.kind, []).append(seed)
        elif verdict.outcome in (CRASHED, ESCAPED):
            self.crashed.setdefault(f"{verdict.outcome}: {verdict.kind}", []).append(seed)
        self._add_counts(verdict)

    def _add_counts(self, verdict: Verdict) -> None:
        self.regions += verdict.regions
        self.recomputations += verdict.recomputations
        self.with_regions += verdict.outcome == RIGHT and verdict.regions > 0
        self.with_recomputations += verdict.outcome == RIGHT and verdict.recomputations > 0
        if verdict.kept is not None and verdict.recomputations:
            self.measured += 1
            self.smaller += verdict.kept[1] < verdict.kept[0]

    @property
    def programs(self) -> int:
        """The number of programs run, discarded ones too."""
        return sum(self.outcomes.values())

    @property
    def false_refusals(self) -> int:
        """The number of refusals of programs that torch's checkpoint runs rightly."""
        return sum(kind.torch[RIGHT] for kind in self.refusals.values())

    @property
    def failed(self) -> bool:
        """True if there was a silent difference, a false refusal, a crash or an escaped signal."""
        return bool(self.outcomes[SILENT] or self.false_refusals or self.crashed)

    def line(self) -> str:
        """Return the counts in one line."""
        rate = self.programs / self.seconds if self.seconds else 0.0
        return (
            f"{self.programs} programs, {rate:.1f} per second: {self.outcomes[RIGHT]} right, {self.outcomes[SILENT]} "
            f"silently different, {self.outcomes[REFUSED]} refused ({self.false_refusals} of them run rightly by torch), "
            f"{sum(map(len, self.crashed.values()))} crashed, {sum(self.discarded.values())} discarded"
        )

    def text(self) -> str:
        """Return all counts."""
        lines = [
            self.line(),
            f"{self.with_regions} right programs had regions, {self.with_recomputations} recomputed; {self.regions} regions "
            f"and {self.recomputations} recomputations in all; {self.smaller} of {self.measured} measured saved fewer bytes",
        ]
        lines += [f"silent, first in {kind}: {len(seeds)}, seeds {_some(seeds)}" for kind, seeds in self.silent.items()]
        lines += [f"{kind}: {len(seeds)}, seeds {_some(seeds)}" for kind, seeds in self.crashed.items()]
        for kind, refusals in sorted(self.refusals.items(), key=lambda item: -sum(item[1].torch.values())):
            torch = ", ".join(f"{count} {name}" for name, count in refusals.torch.most_common())
            seed = refusals.first if refusals.example is None else refusals.example
            lines.append(f"refused {sum(refusals.torch.values())} (torch: {torch}), seed {seed}: {kind}")
        lines += [f"discarded {count}: {kind}" for kind, count in self.discarded.most_common()]
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """Return all counts for machines."""
        return {
            "programs": self.programs,
            "seconds": self.seconds,
            "outcomes": dict(self.outcomes),
            "false_refusals": self.false_refusals,
            "silent": self.silent,
            "crashed": self.crashed,
            "refusals": {
                kind: {"first": item.first, "example": item.example, "torch": dict(item.torch)}
                for kind, item in self.refusals.items()
            },
            "discarded": dict(self.discarded),
            "with_regions": self.with_regions,
            "with_recomputations": self.with_recomputations,
            "regions": self.regions,
            "recomputations": self.recomputations,
            "measured": self.measured,
            "smaller": self.smaller,
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Summary:
        """Make a summary from what `to_json` returned."""
        plain = ("silent", "crashed", "with_regions", "with_recomputations", "regions", "recomputations")
        return cls(
            outcomes=Counter(values["outcomes"]),
            discarded=Counter(values["discarded"]),
            refusals={
                kind: Refusals(item["first"], Counter(item["torch"]), item["example"])
                for kind, item in values["refusals"].items()
            },
            **{name: values[name] for name in (*plain, "measured", "smaller", "seconds")},
        )


def failure_text(seed: int, verdict: Verdict, program: Program) -> str:
    """Return a failure with its program, shrunk or not, and the command that runs it again."""
    torch = f" (torch: {verdict.torch})" if verdict.torch else ""
    message = f"\n{verdict.message.splitlines()[0]}" if verdict.message else ""
    again = f"again: python -m fuzz --count 1 --seed {seed}"
    return f"--- seed {seed}: {verdict.outcome}, {verdict.kind}{torch}{message}\n{again}\n{source_of(program)}"


def _some(seeds: list[int], most: int = 10) -> str:
    return ", ".join(map(str, seeds[:most])) + (", ..." if len(seeds) > most else "")

"""The failures of a campaign, each kind shrunk once."""

from __future__ import annotations

from dataclasses import dataclass, field

from fuzz.generate import generate
from fuzz.judge import CRASHED, SILENT, Verdict, judge
from fuzz.program import Program
from fuzz.run import OURS, Arm
from fuzz.shrink import shrink


@dataclass
class Failures:
    """Shrinks failures, and leaves out those whose kind is known.

    Two silent differences are of one kind if their shrunk programs have the same constructs and statements between
    forward and backward; two refusals if the errors have the same first words.

    Attributes:
        most: the number of failures to shrink.
    """

    most: int = 20
    arm: Arm = OURS
    tried: int = 0
    known: dict[object, int] = field(default_factory=dict)

    def add(self, seed: int, verdict: Verdict) -> Program | None:
        """Return the shrunk program of a failure of a new kind; otherwise None."""
        if not verdict.fails or verdict.outcome == CRASHED:
            return None
        if self.tried == self.most or (verdict.outcome != SILENT and verdict.kind in self.known):
            return None
        self.tried += 1
        program = shrink(generate(seed), lambda smaller: judge(smaller, self.arm).is_like(verdict))
        return program if self._is_new(program, verdict) else None

    def _is_new(self, program: Program, verdict: Verdict) -> bool:
        kind: object = verdict.kind
        if verdict.outcome == SILENT:
            kind = (program.constructs(), tuple((part.number == -1, part.index) for part in program.between))
        self.known[kind] = self.known.get(kind, 0) + 1
        return self.known[kind] == 1

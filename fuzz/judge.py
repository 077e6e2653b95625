"""The verdict on a program: right, silently different, refused, or no test of anything."""

from __future__ import annotations

import re
from dataclasses import dataclass
from types import CodeType

from fuzz.program import Program
from fuzz.run import HOOKED, OURS, PLAIN, STRICT_TORCH, TORCH, Arm, Trace, compiled, kept_bytes, run
from fuzz.source import source_of

RIGHT, SILENT, REFUSED = "right", "silent", "refused"
AS_HOOKED = "as with hooks that do nothing"
"""Other bits than plain, and bit for bit those that torch computes with saved-tensor hooks that return what they get."""
ESCAPED = "signal escaped"
"""An exception that `except Exception` does not catch comes out of a region."""
CRASHED = "crashed"
BY_CHANCE = "right by chance"
PLAIN_RAISES, NOT_REPRODUCIBLE = "plain run raises", "plain run not reproducible"
UNWRITTEN = "plain run may read memory that nobody wrote to"
DISCARDED = (PLAIN_RAISES, NOT_REPRODUCIBLE, UNWRITTEN)
STATE = ("state", "random", "globals", "classes")
"""Notes about state, which torch's checkpoint advances twice."""


@dataclass(frozen=True)
class Verdict:
    """The outcome of one program.

    Attributes:
        outcome: one of the names above.
        kind: the first note that differs; or the class and the first words of the error.
        torch: for a refusal, "right" if torch's checkpoint runs the program bitwise, "right by chance" if it does so from
            other saved tensors than the forward's, "right but for state" if outputs and gradients are right, "wrong" or
            "raises" otherwise.
        kept: bytes that the plain run and the checkpointed run saved, where measured.
    """

    outcome: str
    kind: str = ""
    message: str = ""
    torch: str = ""
    regions: int = 0
    recomputations: int = 0
    kept: tuple[int, int] | None = None

    @property
    def fails(self) -> bool:
        """A silent difference, a crash, an escaped signal, or a refusal of a program that torch's checkpoint runs rightly."""
        return self.outcome in (SILENT, CRASHED, ESCAPED) or (self.outcome == REFUSED and self.torch == RIGHT)

    def is_like(self, other: Verdict) -> bool:
        """Tell if both fail in one way."""
        if self.outcome == REFUSED:
            return (self.outcome, self.kind, self.fails) == (other.outcome, other.kind, other.fails)
        return self.outcome == other.outcome


def judge(program: Program, arm: Arm = OURS, *, measure: bool = False) -> Verdict:
    """Run a program plain and checkpointed and compare; a second plain run, or torch's, only where they differ."""
    source, seed = source_of(program), program.seed
    code = compiled(source)
    plain = run(code, PLAIN, seed)
    if plain.error is not None:
        return Verdict(PLAIN_RAISES, words_of(plain.error), str(plain.error))
    ours = run(code, arm, seed)
    differs = difference(plain, ours)
    counts = {"regions": ours.regions, "recomputations": ours.recomputations}
    if ours.error is None and differs is None:
        kept = (kept_bytes(code, PLAIN, seed), kept_bytes(code, arm, seed)) if measure else None
        return Verdict(RIGHT, kept=kept, **counts)
    if difference(plain, run(code, PLAIN, seed)) is not None:
        return Verdict(NOT_REPRODUCIBLE)
    if _may_read_unwritten(source):
        return Verdict(UNWRITTEN)
    if ours.error is not None and not isinstance(ours.error, Exception):
        return Verdict(ESCAPED, type(ours.error).__name__, **counts)
    if ours.error is not None:
        return Verdict(REFUSED, words_of(ours.error), str(ours.error), torchs_verdict(plain, code, seed), **counts)
    if difference(run(code, HOOKED, seed), ours) is None:
        return Verdict(AS_HOOKED, **counts)
    return Verdict(SILENT, str(differs), **counts)


def _may_read_unwritten(source: str) -> bool:
    """Tell if a plain run may depend on memory that nobody wrote to, whose contents two runs can share by chance.

    torch's rrelu has its noise saved before it draws it: a hook that copies what is saved has a copy of nothing.
    """
    return "rrelu" in source and "saved_tensors_hooks" in source


def difference(one: Trace, other: Trace) -> str | None:
    """Return the name of the first note that differs; None where all are equal."""
    for (name, value), (_, compared) in zip(one.notes, other.notes):
        if value != compared:
            return name
    return None if len(one.notes) == len(other.notes) else "notes"


def torchs_verdict(plain: Trace, code: CodeType, seed: int) -> str:
    """Tell how well torch's checkpoint does.

    It is right by chance where it computes the gradients from other tensors than the forward saved, and rounding, a zero
    or a symmetry hides that: the program of another seed is wrong. To refuse that one is right (see `docs/limits.md`).
    """
    theirs = run(code, TORCH, seed)
    if theirs.error is not None:
        return "raises"
    if difference(plain, theirs) is None:
        return RIGHT if run(code, STRICT_TORCH, seed).error is None else BY_CHANCE
    without = [Trace([note for note in trace.notes if note[0] not in STATE]) for trace in (plain, theirs)]
    return "right but for state" if difference(*without) is None else "wrong"


def words_of(error: BaseException) -> str:
    """Return the class of an error and the first words of its message, names and numbers left out."""
    first = str(error).strip().splitlines()[0] if str(error).strip() else ""
    plain = re.sub(r"`[^`]*`|'[^']*'|\"[^\"]*\"|\([^)]*\)|\[[^\]]*\]", "...", first)
    return f"{type(error).__name__}: {' '.join(re.sub(r'[0-9]+', 'N', plain).split()[:14])}"

"""A campaign as a page of the documentation."""

from __future__ import annotations

import torch

from fuzz.judge import AS_HOOKED, RIGHT
from fuzz.report import Refusals, Summary
from reactivate._text.table import Column, Row, Table

PAGE = """\
# Random programs

`make fuzz` generates random training programs: models with every kind of state that the [rules](semantics.md) name, nested
regions, policies, `apply`, several steps, six kinds of backward. It runs each program plain and checkpointed and compares
every bit of outputs, gradients, state and random number generators. Each program that failed has become a named test.

{programs:,} programs, seeds {first} to {last}, torch {torch}, {hours:.1f} hours in {workers} on the CPU:
`python -m fuzz --count {programs} --seed {first}`. `make campaign` continues this run as long as the code is the same.

{counts}

The programs that are right ran {regions:,} regions and {recomputations:,} recomputations. {discarded:,} of the {programs:,}
programs raise without checkpointing too, mostly because they modify a saved tensor in place.

## Programs that raise

The third column shows the result of torch's checkpoint on the same programs. `...` stands for names.

{refusals}
"""


def page(summary: Summary, first: int, workers: int) -> str:
    """Return the page.

    Args:
        summary: what a campaign found.
        first: the seed of its first program; those of the others follow.
        workers: in how many processes it ran.
    """
    kinds = sorted(summary.refusals.items(), key=lambda item: -sum(item[1].torch.values()))
    discarded = sum(summary.discarded.values())
    rows = {
        "compared": summary.programs - discarded,
        "right, bit for bit": summary.outcomes[RIGHT],
        "other bits, those that torch gives with saved-tensor hooks that do nothing "
        "([why](limits.md#a-double-backward-under-autocast))": summary.outcomes[AS_HOOKED],
        "silently different": sum(map(len, summary.silent.values())),
        "refused": sum(sum(item.torch.values()) for _, item in kinds),
        "refused, and torch's checkpoint runs them rightly": summary.false_refusals,
        "crashed": sum(map(len, summary.crashed.values())),
    }
    return PAGE.format(
        programs=summary.programs,
        first=first,
        last=first + summary.programs - 1,
        torch=torch.__version__.partition("+")[0],
        hours=summary.seconds / 3600,
        workers="one process" if workers == 1 else f"{workers} processes",
        counts=Table(
            (Column("Programs that run without checkpointing"), Column("", True)),
            [Row([name, f"{count:,}"]) for name, count in rows.items()],
        ).markdown(),
        regions=summary.regions,
        recomputations=summary.recomputations,
        discarded=discarded,
        refusals=Table(_COLUMNS, [_row(kind, item) for kind, item in kinds]).markdown(),
    )


_COLUMNS = (Column("Programs", True), Column("First seed", True), Column("torch's checkpoint"), Column("Message"))


def _row(kind: str, item: Refusals) -> Row:
    torchs = ", ".join(f"{name}: {count}" for name, count in item.torch.most_common())
    return Row([str(sum(item.torch.values())), str(item.first), torchs, kind.replace("|", " ")])

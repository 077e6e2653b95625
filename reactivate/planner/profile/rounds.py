"""The steps to simulate so that the figures of every treatment of every unit are known.

Where a model has many equal blocks, each step tries several treatments on different ones of them, and what was found for one
is taken for the others. Of few equal blocks the first or the last may be most of them: their treatments are shared out only
if the blocks come to the same, to the byte, in the plain step and in that in which every unit is recomputed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch.nn import Module

from reactivate.planner.profile.probe import TreatmentTable
from reactivate.planner.treatments import FULL, KEEP, Treatment

REPEATED = 4  # equal blocks that are many


def rounds_of(
    units: Mapping[str, Module], menus: Mapping[str, Sequence[Treatment]], table: TreatmentTable
) -> list[dict[str, Treatment]]:
    """List the steps to simulate, beside that in which every unit is recomputed: a treatment for each unit in each.

    Args:
        units: the units that are called.
        menus: the treatments of each; `KEEP` needs no step of its own.
        table: has the plain step, and that in which every unit is recomputed.
    """
    classes: dict[object, list[str]] = {}
    for path in units:
        classes.setdefault(table.class_of(path), []).append(path)
    groups = [
        group
        for members in classes.values()
        for group in (
            [members] if len(members) >= REPEATED or table.are_alike(members) else [[member] for member in members]
        )
    ]
    rounds: list[dict[str, Treatment]] = []
    for members in groups:
        tries = [item for item in menus[members[0]] if item not in (KEEP, FULL)]
        for start in range(0, len(tries), len(members)):
            number = start // len(members)
            if number == len(rounds):
                rounds.append({})
            rounds[number].update(zip(members, tries[start : start + len(members)]))
    return rounds

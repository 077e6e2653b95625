"""The treatments of the calls of a unit, as one treatment of the unit."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from reactivate.planner.treatments import Treatment


def of_calls(treatments: Sequence[Treatment]) -> Treatment:
    """Return the treatment of a unit whose calls, in their order, have these.

    Example:
        >>> from reactivate.planner.call_treatments import of_calls
        >>> from reactivate.planner.treatments import FULL, KEEP
        >>> of_calls([FULL, FULL, KEEP]).name, of_calls([FULL, FULL]) == FULL
        ('calls 1-2: recompute; 3: keep', True)
    """
    if len(set(treatments)) == 1:
        return treatments[0]
    runs = []
    first = 1
    for treatment, run in groupby(treatments):
        last = first + len(list(run)) - 1
        runs.append(f"{first}: {treatment.name}" if first == last else f"{first}-{last}: {treatment.name}")
        first = last + 1
    return Treatment(f"calls {'; '.join(runs)}", calls=tuple(treatments))

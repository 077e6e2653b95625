"""The treatments of the calls of a unit, as one treatment of the unit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import groupby

from reactivate.planner.treatments import Treatment

MOST_RUNS = 6  # of calls that are treated alike, in a name


def of_calls(treatments: Sequence[Treatment]) -> Treatment:
    """Return the treatment of a unit whose calls, in their order, have these.

    Examples:
        >>> from reactivate.planner.call_treatments import of_calls
        >>> from reactivate.planner.treatments import FULL, KEEP
        >>> of_calls([FULL, FULL, KEEP]).name, of_calls([FULL, KEEP] * 4).name, of_calls([FULL, FULL]) == FULL
        ('calls 1-2: recompute; 3: keep', '4 calls: recompute; 4: keep', True)
    """
    if len(set(treatments)) == 1:
        return treatments[0]
    names = [treatment.name for treatment in treatments]
    runs = [(name, len(list(run))) for name, run in groupby(names)]
    name = f"calls {_places(runs)}" if len(runs) <= MOST_RUNS else _counts(names)
    return Treatment(name, calls=tuple(treatments))


def _places(runs: Sequence[tuple[str, int]]) -> str:
    parts = []
    first = 1
    for name, count in runs:
        parts.append(f"{first}: {name}" if count == 1 else f"{first}-{first + count - 1}: {name}")
        first += count
    return "; ".join(parts)


def _counts(names: Sequence[str]) -> str:
    (name, count), *rest = Counter(names).most_common()
    return "; ".join([f"{count} calls: {name}", *(f"{count}: {name}" for name, count in rest)])

"""The margin for other batches: room for sizes that depend on the numbers in tensors, as the loads of experts do."""

from __future__ import annotations

import functools
import math
from collections import Counter
from dataclasses import dataclass, replace
from fractions import Fraction

from reactivate._modules.paths import is_below
from reactivate.errors import UsageError
from reactivate.planner.budget import parse
from reactivate.planner.profile.trace import Trace

MARGIN = "5%"
"""What is left free, unless the user says otherwise."""


@dataclass(frozen=True)
class DataMargin:
    """The room that is left for other batches.

    Attributes:
        share: the part by which memory may be larger whose size depends on data.
        paths: the modules that make it, with those inside of them; "" for all that a step makes.
    """

    share: Fraction = Fraction(0)
    paths: frozenset[str] = frozenset()

    def over(self, trace: Trace) -> Trace:
        """Return a step in which all such memory is larger by the share, and take down in `trace` what its peak grows by."""
        changes: Counter[int] = Counter()
        gone: Counter[int] = Counter()
        is_of_data = functools.cache(lambda place: any(is_below(place, path) for path in self.paths))
        for item in trace.allocations if self.share and self.paths else ():
            if is_of_data(item.place):
                changes[item.born] += item.size_bytes
                if item.died is not None:
                    gone[item.died] += item.size_bytes
        if not changes:
            trace.margin_bytes = 0
            return trace
        after, live = [0], 0  # `after[k]`: what of it is alive before op k
        ops = []
        for number, op in enumerate(trace.ops):
            top = live + changes[number]
            live = top - gone[number]
            after.append(live)
            more = [math.ceil(self.share * size) for size in (after[number], top, live)]
            sizes = op.start_bytes + more[0], op.top_bytes + more[1], op.live_bytes + more[2]
            ops.append(op._replace(start_bytes=sizes[0], top_bytes=sizes[1], live_bytes=sizes[2]))
        calls = [
            [replace(call, live_bytes=call.live_bytes + math.ceil(self.share * after[call.op])) for call in turn]
            for turn in trace.calls
        ]
        larger = replace(trace, ops=ops, calls=calls)
        trace.margin_bytes = larger.peak_bytes - trace.peak_bytes
        return larger


def parse_margin(margin: str | int | None) -> Fraction:
    """Return the share that a user asked for.

    Args:
        margin: a share, "10%"; 0 for none; None for `MARGIN`.

    Raises:
        UsageError: it is none of these.

    Examples:
        >>> from reactivate.planner.data_margin import parse_margin
        >>> parse_margin("10%"), parse_margin(0)
        (Fraction(1, 10), Fraction(0, 1))
    """
    if (type(margin) is int and margin == 0) or (isinstance(margin, str) and margin.strip() in ("0", "0%")):
        return Fraction(0)
    try:
        share = parse(MARGIN if margin is None else margin).share
    except UsageError:
        share = None
    if share is None:
        raise UsageError(
            f'plan(margin={margin!r}): it takes a share of the memory whose size depends on data ("{MARGIN}", the default), '
            "or 0 for none."
        )
    return share

"""Plans against the fastest peer in equal memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from _figures import SINGLE, Estimate, Key, Times, estimate
from _frontier_results import FASTER, NO_PLAN, SAME, SLOWER, Peer, Planned, Verdict


def verdicts(peers: Sequence[Peer], planned: Sequence[Planned], times: Times) -> Iterator[Verdict]:
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

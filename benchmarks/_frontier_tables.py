"""Results as tables of text, for the terminal and for the docs."""

from __future__ import annotations

from collections.abc import Sequence

from _figures import Estimate
from _frontier_results import FASTER, SLOWER, Frontier, Peer, Planned, Verdict
from _subjects import OURS
from _tables import Table, with_interval

TEXTS = ("way", "mode", "budget", "at the peak of", "fastest peer", "plan", "what it does", "different from plain")
"""Columns of words."""

GOOD, BAD = (FASTER, "yes"), (SLOWER, "no")


def tables(found: Frontier) -> list[Table]:
    """The steps, and the verdicts."""
    eager = (
        f"At the peak of each eager peer: the fastest of them that fits, and the plan for that budget, on {found.model}"
    )
    every = "The same with compiled peers and compiled plans"
    made = [
        step_table(found),
        verdict_table(eager, found.verdicts),
        verdict_table(every, found.verdicts_with_compiled),
    ]
    return [table for table in made if table.rows]


def step_table(found: Frontier) -> Table:
    """Every step with its peak and its time: peers, then plans, each at the least budget that it was made for."""
    plain = found.peers[0]
    lines = [_peer(peer, plain) for peer in found.peers]
    lines += [_planned(item, plain) for item in different_steps(found.planned)]
    header = ("way", "mode", "budget, MB", "peak, MB", "ratio to plain", "step, ms", "ratio to plain", "holds")
    return Table(f"{found.title}. One step", header, lines)


def different_steps(planned: Sequence[Planned]) -> list[Planned]:
    """One of those that share a step: the one with the least budget; by system and budget."""
    found: dict[str, Planned] = {}
    for item in sorted(planned, key=lambda item: (item.system != OURS, item.system, item.budget_bytes)):
        found.setdefault(item.step, item)
    return [*found.values()]


def verdict_table(title: str, verdicts: Sequence[Verdict]) -> Table:
    """Who is faster in equal memory."""
    lines = [
        (
            *(item.budget_of, megabytes(item.budget_bytes), item.rival, item.system),
            "" if item.ratio is None else ratio(item.ratio),
            *(item.words, {True: "yes", False: "no", None: ""}[item.holds]),
        )
        for item in verdicts
    ]
    return Table(
        title, ("at the peak of", "MB", "fastest peer", "plan", "plan's time of its", "the plan is", "holds"), lines
    )


def what_is_done(found: Frontier) -> Table:
    """The plans in words."""
    lines = [
        (item.label, megabytes(item.budget_bytes), ", ".join(f"{count} x {name}" for name, count in item.does.items()))
        for item in sorted(found.planned, key=lambda item: item.budget_bytes)
        if item.system == OURS
    ]
    return Table("What the plans do", ("budget", "MB", "what it does"), lines)


def in_short(found: Frontier) -> str:
    """The verdicts counted."""
    lines = []
    for verdicts, whose in ((found.verdicts, "eager peers"), (found.verdicts_with_compiled, "all peers")):
        counts = {words: [item.words for item in verdicts].count(words) for words in {item.words for item in verdicts}}
        if counts:
            lines.append(f"{whose}: " + ", ".join(f"{words} at {count}" for words, count in sorted(counts.items())))
    return "; ".join(lines)


def optimum_in_words(found: Frontier) -> str:
    """Tabulate the solver against every choice."""
    optimum = found.optimum
    return (
        f"On the measured chain of a small model of the same kind ({optimum.blocks} blocks, {optimum.choices} choices), the "
        f"solver's choice is the optimum of the cost model at {optimum.equal} of {optimum.budgets} budgets; at worst it is "
        f"{optimum.worst:.2%} above it."
    )


def different(found: Frontier) -> list[tuple[str, str]]:
    """(way, what its step leaves different from plain, bit for bit), of those that leave something."""
    ways = [(peer.name, peer.differences) for peer in found.peers]
    ways += [(item.step, item.differences) for item in different_steps(found.planned)]
    return [(name, ", ".join(what)) for name, what in ways if what]


def megabytes(size: int) -> str:
    """In powers of ten."""
    return f"{size / 1e6:.1f}"


def ratio(estimate: Estimate) -> str:
    """With three digits: a percent more or less is what this is about."""
    return f"{estimate.value:.3f} ({estimate.low:.3f} to {estimate.high:.3f})"


def _peer(peer: Peer, plain: Peer) -> tuple[str, ...]:
    return (peer.system, peer.mode, "", *_figures(peer, plain), "")


def _planned(item: Planned, plain: Peer) -> tuple[str, ...]:
    return (
        item.system,
        item.label,
        megabytes(item.budget_bytes),
        *_figures(item, plain),
        "yes" if item.holds else "no",
    )


def _figures(item: Peer | Planned, plain: Peer) -> tuple[str, str, str, str]:
    return (
        megabytes(item.peak_bytes),
        f"{item.peak_bytes / plain.peak_bytes:.2f}",
        with_interval(item.seconds.scaled(1e3)),
        f"{item.seconds.value / plain.seconds.value:.2f}",
    )

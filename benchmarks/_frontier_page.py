"""The page of the docs about plans as they were measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from _figures import SINGLE
from _frontier_results import Frontier
from _frontier_tables import different, in_short, optimum_in_words, tables, what_is_done
from _tables import Table

_INTRODUCTION = """\
# Plans, measured

[`reactivate.plan`](planning.md) promises the fastest policy that fits a budget. This page compares its plans with other
methods (the *peers*). Each plan gets the memory that a peer takes, so the question is which one is faster *at the same
peak*.

`benchmarks/frontier.py --page` wrote this page from its results: no figure is edited by hand.

## How it is measured

- The peak is the largest amount of memory that a step (forward, loss and backward) allocates beyond parameters, gradients and
  inputs, which exist before it. On a CPU it is the running sum of the profiler's memory events, on an accelerator the
  allocator's own peak.
- All steps of a model run in one process on the same parameters, interleaved, in an order that is shuffled in every round.
- The model is profiled once, for the first plan. The budgets are the exact peak of every peer, shares of the plain step's
  peak (90 % to 25 %), and the smallest budget that has a plan.
- *Holds* tells whether the peak of the real step is within the budget of its plan.
- A verdict compares the plan with the fastest peer whose peak is within the budget. The same measurements select that peer,
  which favours the peers a little. *Faster* and *slower* mean that the 95 % interval of the ratio does not contain 1.

The peers are: no checkpointing; torch's non-reentrant checkpointing of every block, and of every second, third and fourth
block; torch's selective checkpointing of every block, which saves the results of products, attention and convolutions; and
in the tables that say so, `torch.compile` with `activation_memory_budget` from 1 to 0, of the whole model and block by
block. In those tables each plan is compiled too: `reactivate.apply(model, plan)` first, then `torch.compile` of the whole
model or of each block. The plan is made for eager code, and the table shows whether its compiled step holds. A verdict
takes the fastest compiled step that holds, for plans as for peers.
"""

_NOTHING = """
Nothing has been measured here: `python benchmarks/frontier.py --out benchmarks/results --page docs/planning-measured.md`.
"""


def to_markdown(frontiers: Sequence[Frontier]) -> str:
    """The whole page."""
    lines = [_INTRODUCTION]
    for found in frontiers:
        lines += _section(found)
    if not frontiers:
        lines.append(_NOTHING.strip())
    return "\n".join(lines).rstrip() + "\n"


def _section(found: Frontier) -> Iterator[str]:
    machine = found.machine
    yield f"## {found.title.partition(':')[0]}\n"
    yield (
        f"{found.title}; {found.parameters / 1e6:.1f} million parameters. {machine['device name']}, Python "
        f"{machine['python']}, torch {machine['torch']}, one thread, {found.rounds} rounds; {SINGLE.describe}. Planned in "
        f"{found.planning_seconds:.1f} s, for each further budget in {found.replanning_seconds:.2f} s. As a picture: "
        f"`benchmarks/results/{found.name}.png`.\n"
    )
    yield f"In short: the plan is, against {in_short(found)}.\n"
    for table in (*tables(found), what_is_done(found)):
        yield from _table(table)
    yield optimum_in_words(found) + "\n"
    yield from _about_differences(found)
    if found.sac_ilp:
        yield "torch's own planner, `torch.distributed._tools.sac_ilp`, is not among the peers:\n"
        yield from (f"- {what}" for what in found.sac_ilp)
        yield ""


def _table(table: Table) -> Iterator[str]:
    yield f"**{table.title}**\n"
    yield table.to_markdown() + "\n"


def _about_differences(found: Frontier) -> Iterator[str]:
    ways = different(found)
    if not ways:
        yield "Every step gives the results of the plain step, bit for bit.\n"
        return
    yield "These differ from the plain step, bit for bit:\n"
    yield from (f"- {name}: {what}" for name, what in ways)
    yield ""

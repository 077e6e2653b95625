"""Measure what `reactivate.plan` brings in equal memory, against other checkpointing and torch's own budgets.

python benchmarks/frontier.py                         every model on the terminal, in half an hour
python benchmarks/frontier.py --models gpt            one of them
python benchmarks/frontier.py --compile gpt           with torch.compile among the peers of this one
python benchmarks/frontier.py --by-block              each block compiled: peers and plans alike
python benchmarks/frontier.py --out DIRECTORY         a JSON file and a plot a model as well
python benchmarks/frontier.py --out DIRECTORY --page PAGE    and a page of the docs of all the JSON files there
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path

os.environ.setdefault("KINETO_LOG_LEVEL", "6")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # the profiler tells of releases that it saw no beginning of

import torch
from _frontier_measure import measure_model
from _frontier_results import NO_PLAN, Frontier, Peer, PlanContents, Settings, Verdict
from _frontier_steps import BLOCKS, WHOLE
from _presentation import (
    Series,
    Table,
    differences,
    megabytes,
    names_of_models,
    read,
    require,
    scatter,
    show,
    with_interval,
    with_page,
    write,
)
from _subjects import BY_BLOCK, FROM_TRANSFORMERS, MODELS
from _timing import CLOCKS, SINGLE, Estimate, Track, progress, silent
from _ways import OURS, PLAIN, SAC, TORCH

LOOKS = {PLAIN: ("black", "X"), TORCH: ("#5c677d", "s"), SAC: ("#2e6f95", "D")}
LOOKS |= {WHOLE: ("#b08900", "^"), BLOCKS: ("#6a994e", "v")}
OUR_LOOKS = {OURS: "o-", f"{OURS} in {WHOLE}": "^--", f"{OURS} in {BLOCKS}": "v:"}
OUR_COLOR = "#d1495b"

INTRODUCTION = """\
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
  Rounds end when every verdict's interval is at most 3 % wide, or the time for them is over: the tables give each interval.
- The model is profiled once, for the first plan. The budgets are the exact peak of every peer, shares of the plain step's
  peak (90 % to 25 %), and the smallest budget that has a plan.
- *Holds* tells whether the peak of the real step is within the budget of its plan.
- A plan of a model whose sizes depend on its data (the mixture of experts) leaves 5 % of its own peak free for other batches:
  it has that much less memory than the peers, which leave nothing.
- A verdict compares the plan with the fastest peer whose peak is within the budget. The same measurements select that peer,
  which favours the peers a little. *Faster* and *slower* mean that the 95 % interval of the ratio does not contain 1.

The peers are: no checkpointing; torch's non-reentrant checkpointing of every block, and of every second, third and fourth
block; torch's selective checkpointing of every block, which saves the results of products, attention and convolutions; and
in the tables that say so, `torch.compile` with `activation_memory_budget` from 1 to 0, of the whole model and block by
block. In those tables each plan is compiled too: `reactivate.apply(model, plan)` first, then `torch.compile` of the whole
model or of each block. The plan is made for eager code, and the table shows whether its compiled step holds. A verdict
takes the fastest compiled step that holds, for plans as for peers.

Sections that end in *each block compiled* are about `plan(compiled="blocks")`: in every way each block is compiled by
inductor, with all else eager. The peers are `activation_memory_budget` at 1, 0.75, 0.5, 0.25 and 0, the same for all
blocks; plain is 1, where nothing is said of memory, and bits are compared with that compiled step. They were measured for a
minute each, on two cores that other programs kept busy (a load of 9 to 17): the intervals are wide."""


NOTHING = """\
Nothing has been measured here: `python benchmarks/frontier.py --out benchmarks/results --page docs/planning-measured.md`."""


# -- tables -----------------------------------------------------------------------------------------------------------


def tables(found: Frontier) -> list[Table]:
    """The steps, and the verdicts."""
    kind = "" if found.settings.by_block else "eager "
    eager = (
        f"At the peak of each {kind}peer: the fastest of them that fits, and the plan for that budget, on {found.model}"
    )
    every = "The same with compiled peers and compiled plans"
    made = [
        step_table(found),
        verdict_table(eager, found.verdicts, found.least_bytes),
        verdict_table(every, found.verdicts_with_compiled, found.least_bytes),
    ]
    return [table for table in made if table.rows]


def step_table(found: Frontier) -> Table:
    """Every step with its peak and its time: peers, then plans, each at the least budget that it was made for."""
    plain = found.peers[0]

    def figures(item: Peer | PlanContents) -> tuple[str, ...]:
        return (
            *(megabytes(item.peak_bytes), f"{item.peak_bytes / plain.peak_bytes:.2f}"),
            *(with_interval(item.seconds.scaled(1e3)), f"{item.seconds.value / plain.seconds.value:.2f}"),
        )

    lines = [(peer.system, peer.mode, "", *figures(peer), "") for peer in found.peers]
    for item in different_steps(found.planned):
        holds = "yes" if item.holds else "no"
        lines.append((item.system, item.label, megabytes(item.budget_bytes), *figures(item), holds))
    header = ("way", "mode", "budget, MB", "peak, MB", "ratio to plain", "step, ms", "ratio to plain", "holds")
    return Table(f"{found.title}. One step", header, lines)


def different_steps(planned: Sequence[PlanContents]) -> list[PlanContents]:
    """One of those that share a step: the one with the least budget; by system and budget."""
    found: dict[str, PlanContents] = {}
    for item in sorted(planned, key=lambda item: (item.system != OURS, item.system, item.budget_bytes)):
        found.setdefault(item.step, item)
    return [*found.values()]


def verdict_table(title: str, verdicts: Sequence[Verdict], least_bytes: int) -> Table:
    """Who is faster in equal memory, and by how much no plan fits: equal megabytes may be different bytes."""

    def words(item: Verdict) -> str:
        is_short = item.words == NO_PLAN and item.budget_bytes < least_bytes
        return f"{item.words}: {least_bytes - item.budget_bytes:,} bytes short" if is_short else item.words

    lines = [
        (
            *(item.budget_of, megabytes(item.budget_bytes), item.rival, item.system),
            "" if item.ratio is None else ratio(item.ratio),
            *(words(item), {True: "yes", False: "no", None: ""}[item.holds]),
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
    own = "peers with each block compiled" if found.settings.by_block else "eager peers"
    for verdicts, whose in ((found.verdicts, own), (found.verdicts_with_compiled, "all peers")):
        counts = {words: [item.words for item in verdicts].count(words) for words in {item.words for item in verdicts}}
        if counts:
            lines.append(f"{whose}: " + ", ".join(f"{words} at {count}" for words, count in sorted(counts.items())))
    return "; ".join(lines)


def ratio(estimate: Estimate) -> str:
    """With three digits: a percent more or less is what this is about."""
    return f"{estimate.value:.3f} ({estimate.low:.3f} to {estimate.high:.3f})"


# -- the page and the plot --------------------------------------------------------------------------------------------


def paragraphs(found: Frontier) -> list[str]:
    """The optimum and the differences in words."""
    optimum = found.optimum
    ways = {peer.name: peer.differences for peer in found.peers}
    ways |= {item.step: item.differences for item in different_steps(found.planned)}
    if found.peers[0].differences:  # the plain step's own
        bits = (
            "Nothing is said of bits: not even two plain steps are equal here, since a kernel of the device adds in "
            "another order each time."
        )
    else:
        bits = differences(ways, "Every step")
    return [
        f"On the measured chain of a small model of the same kind ({optimum.blocks} blocks, {optimum.choices} choices), the "
        f"solver's choice is the optimum of the cost model at {optimum.equal} of {optimum.budgets} budgets; at worst it is "
        f"{optimum.worst:.2%} above it.",
        bits,
    ]


def to_markdown(frontiers: Sequence[Frontier]) -> str:
    """The whole page."""
    blocks = [INTRODUCTION]
    for found in frontiers:
        machine = found.machine
        where = ", each block compiled" if found.settings.by_block else ""
        where += "" if machine["device"] == "cpu" else f", on one {machine['device name']}"
        blocks += [
            f"## {found.title.partition(':')[0]}{where}",
            f"{found.title}; {found.parameters / 1e6:.1f} million parameters. {machine['device name']}, Python "
            f"{machine['python']}, torch {machine['torch']}, one thread, {found.rounds} rounds; {SINGLE.describe}. "
            f"Planned in {found.planning_seconds:.1f} s, for each further budget in {found.replanning_seconds:.2f} s. "
            f"As a picture: `benchmarks/results/{found.name}.png`.",
            f"In short: the plan is, against {in_short(found)}.",
            *(table.with_title() for table in (*tables(found), what_is_done(found))),
            *paragraphs(found),
        ]
    return "\n\n".join(blocks if frontiers else [*blocks, NOTHING]) + "\n"


def plot(found: Frontier, path: Path) -> None:
    """Peak bytes of a step against its time."""
    machine, ours = found.machine, {item.system for item in found.planned}
    series = [
        Series(
            system.replace(OURS, f"{OURS}, planned", 1),
            OUR_COLOR,
            form,
            [(item.peak_bytes, item.seconds, "") for item in found.planned if item.system == system],
        )
        for system, form in OUR_LOOKS.items()
        if system in ours
    ]
    for system, look in LOOKS.items():
        peers = [(peer.peak_bytes, peer.seconds, peer.mode) for peer in found.peers if peer.system == system]
        series += [Series(system, *look, peers)] if peers else []
    caption = (
        f"{found.title}.\nMedians of {found.rounds} rounds with 95 % intervals. {machine['device name']}, torch "
        f"{machine['torch']}, one thread."
    )
    scatter(series, "peak of a step over parameters, gradients and inputs, MB", caption, path)


# -- the command line -------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    options = parse(arguments)
    settings = replace(Settings(), seconds=options.seconds, compiled=tuple(options.compile), clock=options.clock)
    settings = replace(settings, by_block=options.by_block)
    device = torch.device(options.device)
    if options.out and options.models:
        require("matplotlib")
    if options.json:
        found = [*measure(options.models, settings, device, silent, options.out)]
        sys.stdout.write(json.dumps([json.loads(frontier.to_json()) for frontier in found], indent=1) + "\n")
    elif options.models:
        require("rich")
        with progress() as track:
            found = [*measure(options.models, settings, device, track, options.out)]
        for frontier in found:
            show(on_terminal(frontier))
    if options.page:
        write_page(options.out, options.page)


def on_terminal(found: Frontier) -> list[Table | str]:
    """All that was found of a model."""
    planned = f"Planned in {found.planning_seconds:.1f} s, for each further budget {found.replanning_seconds:.2f} s."
    return [found.model, *tables(found), in_short(found), planned, *paragraphs(found)]


def measure(
    models: Sequence[str], settings: Settings, device: torch.device, track: Track = silent, out: Path | None = None
) -> Iterator[Frontier]:
    """Each of `models`, one after the other; what is found of one is written before the next begins."""
    for name in models:
        found = measure_model(name, settings, device, track)
        if out is not None:
            path = write(out, found.name, json=found.to_json())
            plot(found, path.with_name(path.name + ".png"))
        yield found


def write_page(directory: Path, page: Path) -> None:
    """Of all results that are in the directory."""
    frontiers = [read(Frontier, path) for path in directory.glob("frontier-*.json")]
    order = list(MODELS)
    frontiers.sort(
        key=lambda found: (found.machine["device"] != "cpu", found.settings.by_block, order.index(found.model))
    )
    page.write_text(to_markdown(frontiers), encoding="utf-8")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Checked options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--models",
        type=partial(names_of_models, MODELS),
        default=[*MODELS],
        help=f"of {', '.join(MODELS)}; '' for none",
    )
    parser.add_argument(
        "--compile",
        type=partial(names_of_models, MODELS),
        default=[],
        metavar="MODELS",
        help="those with compiled peers: minutes for each",
    )
    parser.add_argument(
        "--by-block", action="store_true", help=f"each block compiled, in peers and plans: of {', '.join(BY_BLOCK)}"
    )
    most = "the most that rounds of a model take (%(default)g)"
    parser.add_argument("--seconds", type=float, default=Settings().seconds, help=most)
    parser.add_argument("--device", default="cpu", help="where the tensors are (default: cpu)")
    parser.add_argument("--clock", choices=CLOCKS, default="cpu", help="time of the processor (default) or of the wall")
    parser.add_argument("--json", action="store_true", help="print the results as JSON instead of tables")
    options = with_page(parser, arguments)
    if options.by_block:
        options.models = [name for name in options.models if name in BY_BLOCK]
    if (lacking := [*filter(options.models.__contains__, FROM_TRANSFORMERS)]) and find_spec("transformers") is None:
        parser.error(
            f"{', '.join(lacking)}: transformers is missing: pip install --group models in a clone, or leave them out: "
            f"--models {','.join(name for name in MODELS if name not in FROM_TRANSFORMERS)}"
        )
    return options


if __name__ == "__main__":
    main()

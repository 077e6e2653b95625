"""Measure the cost of a checkpointed region, against torch's two variants and torch_remat.

python benchmarks/overhead.py                    every figure on the terminal, in about five minutes
python benchmarks/overhead.py --quick            the same in a minute, with wider intervals
python benchmarks/overhead.py --only fixed       one section
python benchmarks/overhead.py --out DIRECTORY    JSON and Markdown as well, named for device and torch version
python tests/public_ways.py benchmarks/overhead.py     with public names of torch only, where there is such a way
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from _overhead_sections import (
    BEYOND_FORWARD,
    OVER_PLAIN,
    PER_TENSOR,
    SECTIONS,
    Quantity,
    Section,
    Subjects,
    ten_modules,
)
from _presentation import Record, Table, describe_machine, read, require, show, with_interval, write
from _timing import (
    CLOCKS,
    METHODS,
    SINGLE,
    Array,
    Estimate,
    Method,
    Settings,
    Times,
    Track,
    View,
    by_both_methods,
    estimate,
    progress,
    silent,
    verdict,
)
from _ways import ALL_OURS, OURS, PLAIN, TORCH, differs_from_plain, make_subjects, named

FEWEST_ROUNDS = 15
QUICK = Settings(rounds=30, batch_seconds=0.003, calls=300)
COMPARED = (
    ("fixed", OVER_PLAIN),
    ("slope", PER_TENSOR),
    ("block", BEYOND_FORWARD),
    ("transformer", BEYOND_FORWARD),
    ("no_grad", OVER_PLAIN),
)
CLOCK_NAMES = {"cpu": "the CPU time of the process", "wall": "wall-clock time"}


@dataclass(frozen=True)
class Row:
    """One figure of one subject by one method.

    Attributes:
        of_torch: the part that it is of torch non-reentrant's figure; None where the figure is a ratio already.
        target: what the last of the two may be at most; None where there is no target.
        verdict: "met", "missed" or "within noise", by the interval.
    """

    section: str
    quantity: str
    subject: str
    method: str
    unit: str
    figure: Estimate
    of_torch: Estimate | None
    target: float | None
    verdict: str | None


@dataclass(frozen=True)
class Results(Record):
    """The results of the benchmark.

    Attributes:
        differences: {subject: what one step of the ten-module block leaves different from plain, bit for bit}.
    """

    benchmark = "overhead"
    explained = {"methods": {method.name: method.describe for method in METHODS}}  # noqa: RUF012
    settings: Settings
    differences: dict[str, list[str]]
    rows: list[Row]


# -- measuring --------------------------------------------------------------------------------------------------------


def measure(sections: Iterable[Section], settings: Settings, device: torch.device, track: Track = silent) -> Results:
    """Every section by both methods."""
    torch.manual_seed(0)
    subjects = make_subjects()
    rows = [row for section in sections for row in _measure_section(section, subjects, settings, device, track)]
    differences = {
        name: differs_from_plain(wrap, partial(ten_modules, device)) for name, wrap in subjects.items() if name != PLAIN
    }
    return Results(describe_machine(device), settings, differences, rows)


def _measure_section(
    section: Section, subjects: Subjects, settings: Settings, device: torch.device, track: Track
) -> Iterator[Row]:
    settings = replace(
        settings,
        rounds=min(settings.rounds, max(FEWEST_ROUNDS, settings.rounds // section.heavy)),
        calls=max(2, settings.calls // section.heavy),
    )
    times = by_both_methods(section.name, section.make_steps(subjects, device), settings, device, track)
    for quantity in section.quantities:
        for subject in quantity.subjects:
            if subject in subjects:
                for method in METHODS:
                    yield make_row(section.name, quantity, subject, method, times[method.name])


def make_row(section: str, quantity: Quantity, subject: str, method: Method, times: Times) -> Row:
    """A subject's figure from the times of a section."""

    def figure(view: View) -> Array:
        return quantity.figure(view, subject)

    def ratio(view: View) -> Array:
        return quantity.figure(view, subject) / quantity.figure(view, TORCH)

    value, of_torch = estimate(figure, times, method), None
    if quantity.unit == "µs":
        value, of_torch = value.scaled(1e6), estimate(ratio, times, method)
    target = quantity.targets.get(method.name) if subject in ALL_OURS else None
    judged = None if target is None else verdict(of_torch or value, target)
    return Row(section, quantity.name, subject, method.name, quantity.unit, value, of_torch, target, judged)


# -- presenting -------------------------------------------------------------------------------------------------------


def tables(results: Results) -> list[Table]:
    """The targets, then a table for each figure."""
    figures = (_figure_table(results, section, quantity) for section in SECTIONS for quantity in section.quantities)
    return [table for table in (_target_table(results), *figures) if table.rows]


def _target_table(results: Results) -> Table:
    rows = [
        (
            *(f"{row.section}: {row.quantity}", row.subject, row.method, with_interval(row.of_torch or row.figure)),
            *(f"{row.target:.2f}", str(row.verdict)),
        )
        for row in results.rows
        if row.target is not None
    ]
    header = ("figure", "way", "method", "ratio", "at most", "")
    return Table("Targets: ratios to torch non-reentrant, unless noted", header, rows)


def _figure_table(results: Results, section: Section, quantity: Quantity) -> Table:
    found = [row for row in results.rows if (row.section, row.quantity) == (section.name, quantity.name)]
    header = ["way"]
    for method in METHODS:
        header += [f"{method.name}, {quantity.unit}"] + ["ratio to torch"] * (quantity.unit == "µs")
    rows = []
    for subject in dict.fromkeys(row.subject for row in found):
        cells = [named(subject, results.machine)]
        for method in METHODS:
            row = next(row for row in found if (row.subject, row.method) == (subject, method.name))
            cells += [with_interval(figure) for figure in (row.figure, row.of_torch) if figure is not None]
        rows.append(tuple(cells))
    return Table(f"{section.title}: {quantity.name}", tuple(header), rows)


def to_markdown(results: Results) -> str:
    """A page for the docs to include; its headings start at the third level."""
    machine = results.machine
    lines = [
        f"{machine['device name']}, Python {machine['python']}, torch {machine['torch']}, one thread. "
        "All implementations run in one process, interleaved, in an order that is shuffled in every round. The benchmark "
        f"measures {CLOCK_NAMES[results.settings.clock]}. The garbage collector is on.",
        "",
        *(f"- *{method.name}*: {method.describe}." for method in METHODS),
        "",
    ]
    for table in tables(results):
        lines += [f"### {table.title}", "", table.to_markdown(), ""]
    lines += ["### Differences from the plain model, bit for bit, after one step of the ten-module block", ""]
    return "\n".join([*lines, *_differences(results)]) + "\n"


def compared(directory: Path) -> Table:
    """Compare the results in a directory by the same figures: devices, torches, private and public names of torch."""
    found = [read(Results, path) for path in sorted(directory.glob("overhead-*.json"))]
    header = ("torch", "names of torch", "device", *(f"{name}: {quantity}" for name, quantity in COMPARED))
    lines = [
        (
            *(str(each.machine["torch"]), str(each.machine.get("names of torch", "private"))),
            str(each.machine["device name"]),
            *(with_interval(_ratio_of(each, *figure)) for figure in COMPARED),
        )
        for each in found
    ]
    return Table("Ratios to torch non-reentrant, single calls", header, lines)


def _ratio_of(results: Results, section: str, quantity: str) -> Estimate:
    wanted = (section, quantity, OURS, SINGLE.name)
    return next(
        row.of_torch
        for row in results.rows
        if (row.section, row.quantity, row.subject, row.method) == wanted and row.of_torch is not None
    )


def _differences(results: Results) -> list[str]:
    return [
        f"- {named(name, results.machine)}: {', '.join(what) or 'nothing'}"
        for name, what in results.differences.items()
    ]


# -- the command line -------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    options = parse(arguments)
    sections = [section for section in SECTIONS if section.name in (options.only or [section.name])]
    settings = replace(QUICK if options.quick else Settings(), clock=options.clock)
    device = torch.device(options.device)
    if options.json:
        results = measure(sections, settings, device)
        sys.stdout.write(results.to_json())
    else:
        require("rich")
        with progress() as track:
            results = measure(sections, settings, device, track)
        show([*tables(results), "The ten-module block differs from plain, bit for bit, in:", *_differences(results)])
    if options.out:
        write(options.out, results.name, json=results.to_json(), md=to_markdown(results))
        write(options.out, "overhead-compared", md=compared(options.out).with_title() + "\n")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Checked options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [section.name for section in SECTIONS]
    parser.add_argument("--only", choices=names, nargs="+", metavar="SECTION", help=", ".join(names))
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument(
        "--device", default="cpu", help="where the tensors are; what is timed is the host (default: cpu)"
    )
    parser.add_argument("--clock", choices=CLOCKS, default="cpu", help="time of the processor (default) or of the wall")
    parser.add_argument("--out", type=Path, metavar="DIRECTORY", help="where to write the results")
    parser.add_argument("--json", action="store_true", help="print the results as JSON instead of tables")
    options = parser.parse_args(arguments)
    if options.out and options.only:
        parser.error("--out writes results of every section; leave --only out.")
    return options


if __name__ == "__main__":
    main()

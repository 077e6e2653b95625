"""Results as tables of text, for the terminal and for the docs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from _figures import METHODS, Estimate
from _results import Results, Row
from _sections import SECTIONS, Quantity, Section
from _subjects import REMAT

_CLOCKS = {"cpu": "the CPU time of the process", "wall": "wall-clock time"}


@dataclass(frozen=True)
class Table:
    """Cells of text under a header."""

    title: str
    header: tuple[str, ...]
    rows: list[tuple[str, ...]]

    def to_markdown(self) -> str:
        lines = [self.header, ("---", *["---:"] * (len(self.header) - 1)), *self.rows]
        return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def tables(results: Results) -> list[Table]:
    """The targets, then a table for each figure."""
    return [table for table in (target_table(results), *figure_tables(results)) if table.rows]


def target_table(results: Results) -> Table:
    """Every figure that has a target."""
    rows = [
        (
            f"{row.section}: {row.quantity}",
            row.subject,
            row.method,
            with_interval(row.of_torch or row.figure),
            f"{row.target:.2f}",
            str(row.verdict),
        )
        for row in results.rows
        if row.target is not None
    ]
    header = ("figure", "way", "method", "ratio", "at most", "")
    return Table("Targets: ratios to torch non-reentrant, unless noted", header, rows)


def figure_tables(results: Results) -> Iterator[Table]:
    """All figures."""
    for section in SECTIONS:
        for quantity in section.quantities:
            yield _figure_table(results, section, quantity)


def _figure_table(results: Results, section: Section, quantity: Quantity) -> Table:
    found = [row for row in results.rows if (row.section, row.quantity) == (section.name, quantity.name)]
    header = ["way"]
    for method in METHODS:
        header += [f"{method.name}, {quantity.unit}"] + ["ratio to torch"] * (quantity.unit == "µs")
    rows = []
    for subject in dict.fromkeys(row.subject for row in found):
        cells = [named(subject, results)]
        for method in METHODS:
            cells += _cells(next(row for row in found if (row.subject, row.method) == (subject, method.name)))
        rows.append(tuple(cells))
    return Table(f"{section.title}: {quantity.name}", tuple(header), rows)


def _cells(row: Row) -> list[str]:
    cells = [with_interval(row.figure)]
    return cells if row.of_torch is None else [*cells, with_interval(row.of_torch)]


def named(subject: str, results: Results) -> str:
    """The subject, with the version where it is another package."""
    return f"{subject} {results.machine['torch_remat']}" if subject == REMAT else subject


def with_interval(estimate: Estimate) -> str:
    """At least two digits that count."""
    digits = 0 if abs(estimate.value) >= 100 else 1 if abs(estimate.value) >= 10 else 2
    value, low, high = (f"{number:.{digits}f}" for number in (estimate.value, estimate.low, estimate.high))
    return f"{value} ({low} to {high})"


def _only(machine: Mapping[str, object]) -> str:
    return "; with public names of torch only" if machine.get("names of torch") == "public" else ""


def to_markdown(results: Results) -> str:
    """A page for the docs to include; its headings start at the third level."""
    machine = results.machine
    lines = [
        f"{machine['device name']}, Python {machine['python']}, torch {machine['torch']}, one thread{_only(machine)}. "
        "All implementations run in one process, interleaved, in an order that is shuffled in every round. The benchmark "
        f"measures {_CLOCKS[results.settings.clock]}. The garbage collector is on.",
        "",
        *(f"- *{method.name}*: {method.describe}." for method in METHODS),
        "",
    ]
    for table in tables(results):
        lines += [f"### {table.title}", "", table.to_markdown(), ""]
    lines += ["### Differences from the plain model, bit for bit, after one step of the ten-module block", ""]
    lines += [f"- {named(name, results)}: {', '.join(what) or 'nothing'}" for name, what in results.differences.items()]
    return "\n".join(lines) + "\n"

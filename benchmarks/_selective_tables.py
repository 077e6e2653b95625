"""Results as tables of text, for the terminal and for the docs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from _figures import METHODS, Method
from _selective_results import (
    BLOCK,
    EXPERIMENT,
    LARGE,
    OF_REMAT,
    OF_TORCH,
    OVER_IDEAL,
    OVER_PLAIN,
    Experiment,
    Point,
    Results,
    Row,
)
from _subjects import REMAT
from _tables import Table, with_interval

TITLES = {
    BLOCK: "A small transformer block: 50 ops, 28 saved tensors",
    LARGE: "The same block, so large that only its ops matter",
    EXPERIMENT: "Memory against speed: every mode on one model",
}
_NONE = ""


def tables(results: Results, part: str) -> list[Table]:
    """The tables of a part: none if it was not measured."""
    makers = {BLOCK: block_tables, LARGE: large_tables, EXPERIMENT: experiment_tables}
    return [table for table in makers[part](results) if table.rows]


def block_tables(results: Results) -> Iterator[Table]:
    """Tabulate what is kept, the times over plain, and the targets."""
    rows = [row for row in results.rows if row.part == BLOCK]
    yield kept_table(results, BLOCK)
    for method in METHODS:
        yield times_table([row for row in rows if row.method == method.name], method, results)
    yield target_table(rows, results)


def times_table(rows: Sequence[Row], method: Method, results: Results) -> Table:
    """The times over plain by one method."""
    lines: list[tuple[str, ...]] = []
    for system, keeps in dict.fromkeys((row.system, row.keeps) for row in rows):
        mine = [row for row in rows if (row.system, row.keeps) == (system, keeps)]
        figures = {row.quantity: with_interval(row.figure) for row in mine}
        cells = (figures.get(quantity, _NONE) for quantity in (OVER_PLAIN, OF_TORCH, OF_REMAT))
        lines.append((named(system, results), keeps, *cells))
    header = ("way", "keeps", "µs over plain", OF_TORCH, OF_REMAT)
    return Table(f"Forward and backward, {method.name}", header, lines)


def large_tables(results: Results) -> Iterator[Table]:
    """Tabulate what is kept, and the time over the ideal."""
    rows = [row for row in results.rows if (row.part, row.quantity) == (LARGE, OVER_IDEAL)]
    yield kept_table(results, LARGE)
    lines: list[tuple[str, ...]] = [
        (
            named(row.system, results),
            row.keeps,
            _percent(row),
            "" if row.target is None else f"{row.target:.0%}",
            row.verdict or "",
        )
        for row in rows
    ]
    yield Table("Forward and backward, over the ideal", ("way", "keeps", "over the ideal", "at most", ""), lines)


def kept_table(results: Results, part: str) -> Table:
    """Bytes after the forward pass."""
    lines: list[tuple[str, ...]] = [
        (named(kept.system, results), kept.keeps, f"{kept.kept_bytes:,}", f"{kept.allocated_bytes:,}")
        for kept in results.kept
        if kept.part == part
    ]
    return Table("After the forward pass", ("way", "keeps", "bytes of activations", "bytes allocated"), lines)


def target_table(rows: Sequence[Row], results: Results) -> Table:
    """Every figure that has a target."""
    lines: list[tuple[str, ...]] = [
        (
            named(row.system, results),
            row.keeps,
            row.quantity,
            row.method,
            with_interval(row.figure),
            f"{row.target:.2f}",
            row.verdict or "",
        )
        for row in rows
        if row.target is not None
    ]
    return Table("Targets", ("way", "keeps", "time over plain", "method", "ratio", "at most", ""), lines)


def experiment_tables(results: Results) -> Iterator[Table]:
    """At one batch, and at equal memory."""
    if results.experiment is not None:
        yield batch_table(results.experiment.at_equal_batch, results)
        yield memory_table(results.experiment, results)


def batch_table(points: Sequence[Point], results: Results) -> Table:
    """Peak and time of a step; the first of `points` is plain."""
    plain = points[0]
    lines: list[tuple[str, ...]] = [
        (
            *(point.mode, named(point.system, results)),
            *(f"{point.peak_bytes / 1e6:.1f}", f"{point.peak_bytes / plain.peak_bytes:.2f}"),
            *(with_interval(point.seconds.scaled(1e3)), f"{point.seconds.value / plain.seconds.value:.2f}"),
        )
        for point in by_mode(points)
    ]
    return Table(
        f"One batch, of {plain.batch}",
        ("mode", "way", "peak, MB", "ratio to plain", "step, ms", "ratio to plain"),
        lines,
    )


def memory_table(experiment: Experiment, results: Results) -> Table:
    """Speed within one budget."""
    lines: list[tuple[str, ...]] = [
        (
            *(point.mode, named(point.system, results), str(point.batch), f"{point.peak_bytes / 1e6:.1f}"),
            with_interval(point.tokens_per_second),
        )
        for point in by_mode(experiment.at_equal_memory)
    ]
    title = f"The largest batch below {experiment.budget_bytes / 1e6:.1f} MB"
    return Table(title, ("mode", "way", "batch", "peak, MB", "tokens a second"), lines)


def by_mode(points: Sequence[Point]) -> list[Point]:
    """Sorted so that the systems of a mode are neighbours."""
    modes = list(dict.fromkeys(point.mode for point in points))
    return sorted(points, key=lambda point: modes.index(point.mode))


def named(system: str, results: Results) -> str:
    """The system, with the version where it is another package."""
    return f"{system} {results.machine['torch_remat']}" if system == REMAT else system


def different(results: Results, part: str) -> list[tuple[str, str]]:
    """(way, what its step leaves different from plain, bit for bit), of those that leave something."""
    found = results.differences.get(part, {})
    if part == EXPERIMENT and results.experiment is not None:
        found = results.experiment.differences
    return [(name, ", ".join(what)) for name, what in found.items() if what]


def _percent(row: Row) -> str:
    value, low, high = (f"{100 * part:.1f}" for part in (row.figure.value, row.figure.low, row.figure.high))
    return f"{value} % ({low} to {high})"

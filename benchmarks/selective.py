"""Measure what saved calls inside of checkpointed regions cost and bring, against torch's SAC and torch_remat.

python benchmarks/selective.py                      all parts on the terminal, in about ten minutes
python benchmarks/selective.py --quick              the same in seconds, on less
python benchmarks/selective.py --only experiment    one part
python benchmarks/selective.py --out DIRECTORY      JSON, Markdown and a plot as well, named for device and torch version

The parts: `block`, one small transformer block, where the cost of the machinery shows; `large`, the same block so large
that only what it computes should count; `experiment`, memory against speed of every mode on a whole model.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # the profiler tells of releases that it saw no beginning of

import _selective_block as block
import torch
from _presentation import (
    Record,
    Series,
    Table,
    describe_machine,
    differences,
    megabytes,
    require,
    scatter,
    show,
    with_interval,
    write,
)
from _selective_block import BLOCK, LARGE, OF_REMAT, OF_TORCH, OVER_IDEAL, OVER_PLAIN, Kept, Row
from _selective_experiment import EXPERIMENT, Experiment, Point, Settings, measure_experiment
from _timing import CLOCKS, METHODS, SINGLE, Method, Settings as BlockSettings, Track, progress, silent
from _ways import OURS, PLAIN, REMAT, SAC, TORCH, named

PARTS = (BLOCK, LARGE, EXPERIMENT)
TITLES = {
    BLOCK: "A small transformer block: 50 ops, 28 saved tensors",
    LARGE: "The same block, so large that only its ops matter",
    EXPERIMENT: "Memory against speed: every mode on one model",
}
LOOKS = {OURS: ("#d1495b", "o"), TORCH: ("#8d99ae", "s"), SAC: ("#2e6f95", "D"), REMAT: ("#4f5d75", "^")}
LOOKS |= {PLAIN: ("black", "X")}

QUICK = Settings(
    block=BlockSettings(rounds=10, batch_seconds=0.002, calls=20),
    large_width=128,
    large_length=64,
    large_calls=10,
    layers=6,
    dim=32,
    heads=2,
    context=32,
    experiment_calls=3,
)


@dataclass(frozen=True)
class Results(Record):
    """The findings, of the parts that were measured.

    Attributes:
        differences: {part: {way: what one step leaves different from plain, bit for bit}}.
    """

    benchmark = "selective"
    explained = {"methods": {method.name: method.describe for method in METHODS}}  # noqa: RUF012
    settings: Settings
    rows: list[Row] = field(default_factory=list)
    kept: list[Kept] = field(default_factory=list)
    differences: dict[str, dict[str, list[str]]] = field(default_factory=dict)
    experiment: Experiment | None = None


def measure(parts: Sequence[str], settings: Settings, device: torch.device, track: Track = silent) -> Results:
    """Each of `parts`, one after the other."""
    torch.manual_seed(0)
    results = Results(describe_machine(device), settings)
    for part, make in block.MAKERS.items():
        if part in parts:
            results.kept.extend(block.kept_by(part, make(settings), device))
            results.differences[part] = block.differences(make(settings), device)
            results.rows.extend(block.MEASURES[part](settings, device, track))
    if EXPERIMENT in parts:
        results = replace(results, experiment=measure_experiment(settings, device, track))
    return results


# -- tables -----------------------------------------------------------------------------------------------------------


def tables(results: Results, part: str) -> list[Table]:
    """The tables of a part: none if it was not measured."""
    makers = {BLOCK: _block_tables, LARGE: _large_tables, EXPERIMENT: _experiment_tables}
    return [table for table in makers[part](results) if table.rows]


def _block_tables(results: Results) -> Iterator[Table]:
    rows = [row for row in results.rows if row.part == BLOCK]
    yield _kept_table(results, BLOCK)
    for method in METHODS:
        yield _times_table([row for row in rows if row.method == method.name], method, results)
    targets = [
        (
            *(named(row.system, results.machine), row.keeps, row.quantity, row.method),
            *(with_interval(row.figure), f"{row.target:.2f}", row.verdict or ""),
        )
        for row in rows
        if row.target is not None
    ]
    yield Table("Targets", ("way", "keeps", "time over plain", "method", "ratio", "at most", ""), targets)


def _times_table(rows: Sequence[Row], method: Method, results: Results) -> Table:
    lines = []
    for system, keeps in dict.fromkeys((row.system, row.keeps) for row in rows):
        figures = {
            row.quantity: with_interval(row.figure) for row in rows if (row.system, row.keeps) == (system, keeps)
        }
        cells = (figures.get(quantity, "") for quantity in (OVER_PLAIN, OF_TORCH, OF_REMAT))
        lines.append((named(system, results.machine), keeps, *cells))
    header = ("way", "keeps", "µs over plain", OF_TORCH, OF_REMAT)
    return Table(f"Forward and backward, {method.name}", header, lines)


def _kept_table(results: Results, part: str) -> Table:
    lines = [
        (named(kept.system, results.machine), kept.keeps, f"{kept.kept_bytes:,}", f"{kept.allocated_bytes:,}")
        for kept in results.kept
        if kept.part == part
    ]
    return Table("After the forward pass", ("way", "keeps", "bytes of activations", "bytes allocated"), lines)


def _large_tables(results: Results) -> Iterator[Table]:
    yield _kept_table(results, LARGE)
    lines = []
    for row in results.rows:
        if (row.part, row.quantity) == (LARGE, OVER_IDEAL):
            value, low, high = (f"{100 * part:.1f}" for part in (row.figure.value, row.figure.low, row.figure.high))
            target = "" if row.target is None else f"{row.target:.0%}"
            way = (named(row.system, results.machine), row.keeps)
            lines.append((*way, f"{value} % ({low} to {high})", target, row.verdict or ""))
    yield Table("Forward and backward, over the ideal", ("way", "keeps", "over the ideal", "at most", ""), lines)


def _experiment_tables(results: Results) -> Iterator[Table]:
    found, machine = results.experiment, results.machine
    if found is None:
        return
    plain = found.at_equal_batch[0]
    lines: list[tuple[str, ...]] = [
        (
            *(point.mode, named(point.system, machine), megabytes(point.peak_bytes)),
            f"{point.peak_bytes / plain.peak_bytes:.2f}",
            *(with_interval(point.seconds.scaled(1e3)), f"{point.seconds.value / plain.seconds.value:.2f}"),
        )
        for point in _by_mode(found.at_equal_batch)
    ]
    header = ("mode", "way", "peak, MB", "ratio to plain", "step, ms", "ratio to plain")
    yield Table(f"One batch, of {plain.batch}", header, lines)
    lines = [
        (
            *(point.mode, named(point.system, machine), str(point.batch), megabytes(point.peak_bytes)),
            with_interval(point.tokens_per_second),
        )
        for point in _by_mode(found.at_equal_memory)
    ]
    header = ("mode", "way", "batch", "peak, MB", "tokens a second")
    yield Table(f"The largest batch below {megabytes(found.budget_bytes)} MB", header, lines)


def _by_mode(points: Sequence[Point]) -> list[Point]:
    """Sorted so that the systems of a mode are neighbours."""
    modes = list(dict.fromkeys(point.mode for point in points))
    return sorted(points, key=lambda point: modes.index(point.mode))


# -- the page and the plot --------------------------------------------------------------------------------------------


def to_markdown(results: Results) -> str:
    """All parts that were measured, each between the marks that `--8<-- "FILE:PART"` looks for.

    Headings start at the third level.
    """
    machine, blocks = results.machine, list[str]()
    where = (
        f"{machine['device name']}, Python {machine['python']}, torch {machine['torch']}, one thread. All implementations "
        "run in one process, interleaved, in an order that is shuffled in every round."
    )
    for part in PARTS:
        found = tables(results, part)
        if found:
            blocks += [f"<!-- --8<-- [start:{part}] -->", f"### {TITLES[part]}", f"{where}\n{_about(results, part)}"]
            blocks += [table.with_title() for table in found]
            blocks += [_differences(results, part), f"<!-- --8<-- [end:{part}] -->"]
    return "\n\n".join(blocks) + "\n"


def _about(results: Results, part: str) -> str:
    settings = results.settings
    if part == BLOCK:
        return (
            "Ratios compare with the implementation of torch that keeps the same calls, or with torch_remat. If no call is "
            "kept, torch's implementation is non-reentrant checkpointing; if some are, it is selective activation "
            "checkpointing (SAC). torch and torch_remat also keep the result of the last linear, which no backward reads, "
            "and torch_remat keeps the copies that `matmul` makes. Allocated bytes include the result of the block and the "
            "states of random number generators, but not the block's argument. "
            + " ".join(f"*{method.name}*: {method.describe}." for method in METHODS)
        )
    if part == LARGE or results.experiment is None:
        return (
            f"{settings.large_width} features, {settings.large_length} tokens, a batch of one. The ideal is the time of the "
            "plain step plus that of the recomputed ops alone: the same forward without a graph, which looks up the results "
            "of kept calls and omits the last product and sum, since no backward reads them. "
            f"{SINGLE.name.capitalize()}: {SINGLE.describe}."
        )
    return (
        f"The byte-level GPT of `examples/byte_gpt.py`: {settings.layers} blocks of width {settings.dim}, "
        f"{results.experiment.parameters / 1e6:.1f} million parameters, {settings.context} tokens a sequence, no "
        "dropout; forward and backward. The peak is the memory that torch allocates in a step beyond what was allocated "
        f"before; the time is the median of {settings.experiment_calls} rounds, with a 95 % bootstrap interval."
    )


def _differences(results: Results, part: str) -> str:
    is_experiment = part == EXPERIMENT and results.experiment is not None
    found = results.experiment.differences if is_experiment else results.differences.get(part, {})
    return differences(found, "Every way")


def plot(results: Results, path: Path) -> None:
    """Peak bytes of a step against its time, at one batch."""
    settings, machine, points = results.settings, results.machine, results.experiment.at_equal_batch
    series = [
        Series(named(system, machine), *look, [(p.peak_bytes, p.seconds, p.mode) for p in points if p.system == system])
        for system, look in LOOKS.items()
    ]
    caption = (
        f"{settings.layers} blocks of width {settings.dim}, {points[0].batch} x {settings.context} tokens; medians with 95 % "
        f"intervals.\n{machine['device name']}, torch {machine['torch']}, one thread."
    )
    scatter([one for one in series if one.spots], "peak of activations in a step, MB", caption, path)


# -- the command line -------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    options = parse(arguments)
    settings = replace(QUICK if options.quick else Settings(), clock=options.clock)
    device, parts = torch.device(options.device), options.only or PARTS
    if options.out:
        require("matplotlib")
    if options.json:
        results = measure(parts, settings, device)
        sys.stdout.write(results.to_json())
    else:
        require("rich")
        with progress() as track:
            results = measure(parts, settings, device, track)
        for part in PARTS:
            found = tables(results, part)
            show([TITLES[part], *found, _differences(results, part)] if found else [])
    if options.out:
        path = write(options.out, results.name, json=results.to_json(), md=to_markdown(results))
        if results.experiment is not None:
            plot(results, path.with_name(path.name + ".png"))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Checked options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=PARTS, nargs="+", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--quick", action="store_true", help="smaller models and few rounds")
    parser.add_argument("--device", default="cpu", help="where the tensors are (default: cpu)")
    parser.add_argument("--clock", choices=CLOCKS, default="cpu", help="time of the processor (default) or of the wall")
    parser.add_argument("--out", type=Path, metavar="DIRECTORY", help="where to write the results of these parts")
    parser.add_argument("--json", action="store_true", help="print the results as JSON instead of tables")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()

"""Presentation of results: tables for Markdown and the terminal, plots, and JSON files with the machine in them."""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise, product
from pathlib import Path
from types import UnionType
from typing import Any, ClassVar, TypeVar, Union, get_args, get_origin, get_type_hints

import torch
from _timing import Estimate

from reactivate._torch.private_api import ways

Machine = dict[str, str | int | None]
Target = tuple[float, float]
Kind = TypeVar("Kind")

COLORS = {"met": "green", "missed": "bold red", "within noise": "yellow"}
COLORS |= {"faster": "green", "slower": "bold red", "yes": "green", "no": "bold red"}
SIDES = ((1, 0), (0, 1), (0, -1), (-1, 0), (1, 1), (1, -1), (-1, 1), (-1, -1))
"""Of a point, where its label may stand."""
GAP = 7
"""Pixels around the middle of a point that stay free."""


def require(*packages: str) -> None:
    """Notice that an optional package is missing before a minute is spent."""
    for package in packages:
        try:
            import_module(package)
        except ImportError:
            sys.exit(
                f"This needs {package}: pip install '.[all]' --group bench in a clone. (With --json alone it does without.)"
            )


# -- tables -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Table:
    """Cells of text under a header."""

    title: str
    header: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]

    def to_markdown(self) -> str:
        lines = [self.header, ("---", *["---:"] * (len(self.header) - 1)), *self.rows]
        return "\n".join("| " + " | ".join(line) + " |" for line in lines)

    def with_title(self) -> str:
        """Return the Markdown under the title in bold."""
        return f"**{self.title}**\n\n{self.to_markdown()}"


def with_interval(estimate: Estimate) -> str:
    """At least two digits that count."""
    digits = 0 if abs(estimate.value) >= 100 else 1 if abs(estimate.value) >= 10 else 2
    value, low, high = (f"{number:.{digits}f}" for number in (estimate.value, estimate.low, estimate.high))
    return f"{value} ({low} to {high})"


def megabytes(size: int) -> str:
    """In powers of ten."""
    return f"{size / 1e6:.1f}"


def differences(found: Mapping[str, Sequence[str]], every: str) -> str:
    """Say what each of `found` leaves different from the plain step, or that `every` one leaves the same."""
    different = [f"- {name}: {', '.join(what)}" for name, what in found.items() if what]
    if not different:
        return f"{every} gives the results of the plain step, bit for bit."
    return "\n".join(["These differ from the plain step, bit for bit:", "", *different])


def show(blocks: Iterable[Table | str]) -> None:
    """Print tables and paragraphs on the terminal."""
    from rich import box  # an optional package
    from rich.console import Console
    from rich.table import Table as Grid

    console = Console()
    for block in blocks:
        if isinstance(block, str):
            console.print(block, markup=False, highlight=False)
            continue
        grid = Grid(title=block.title.replace("`", ""), box=box.SIMPLE_HEAD, title_style="bold")
        for index, name in enumerate(block.header):
            is_text = any(row[index][:1].isalpha() for row in block.rows)
            grid.add_column(name, justify="left" if is_text else "right")
        for cells in block.rows:
            grid.add_row(*(f"[{COLORS[cell]}]{cell}[/]" if cell in COLORS else cell for cell in cells))
        console.print(grid)


# -- plots ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Series:
    """Steps of one system in a plot.

    Attributes:
        form: marker and line, as matplotlib writes them.
        spots: (bytes at the peak, seconds, label or "") of each step.
    """

    name: str
    color: str
    form: str
    spots: Sequence[tuple[int, Estimate, str]]

    def places(self) -> dict[Target, Estimate]:
        """Return (MB, ms) of each step; equal steps are one point."""
        return {(peak / 1e6, took.value * 1e3): took.scaled(1e3) for peak, took, _ in self.spots}


def scatter(series: Sequence[Series], xlabel: str, caption: str, path: Path) -> None:
    """Draw peak memory against time, with intervals."""
    from matplotlib.figure import Figure  # an optional package

    figure = Figure(figsize=(9, 5.5), dpi=150, layout="constrained")
    axes = figure.subplots()
    for one in series:
        found = sorted(one.places().items())
        (x, y), took = zip(*(place for place, _ in found), strict=True), [took for _, took in found]
        # An interval need not contain its value.
        below, above = [max(0.0, e.value - e.low) for e in took], [max(0.0, e.high - e.value) for e in took]
        axes.errorbar(
            x,
            y,
            [below, above],
            fmt=one.form,
            color=one.color,
            elinewidth=0.8,
            capsize=1.5,
            ms=6,
            lw=1.2,
            label=one.name,
        )
    axes.set(xlabel=xlabel, ylabel="time of a step, ms", axisbelow=True)
    axes.margins(x=0.1, y=0.15)
    axes.set_xlim(left=0)
    axes.grid(color="#eeeeee")
    axes.spines[["top", "right"]].set_visible(False)
    legend = axes.legend(frameon=False, fontsize=9)
    figure.suptitle(caption, fontsize=8, color="gray", x=0.01, ha="left")
    figure.draw_without_rendering()  # from here on, points have places on the page
    _label(series, axes, legend.get_window_extent())
    figure.savefig(path)


def _label(series: Sequence[Series], axes: Any, legend: Any) -> None:
    """Write labels beside their points where they cover nothing; farther away with a line to the point."""
    from matplotlib.text import Text

    taken, inside = [*_boxes(series, axes), legend], axes.get_window_extent()
    for color, (peak, took, label) in ((item.color, spot) for item in series for spot in item.spots if spot[2]):
        for distance, (x, y) in product((7, 11, 16, 24, 34, 46, 60), SIDES):
            text = axes.annotate(
                label,
                (peak / 1e6, took.value * 1e3),
                (x * distance, y * distance),
                textcoords="offset points",
                ha={-1: "right", 0: "center", 1: "left"}[x],
                va={-1: "top", 0: "center", 1: "bottom"}[y],
                size=8,
                color=color,
                arrowprops={"arrowstyle": "-", "color": color, "lw": 0.5} if distance > 16 else None,
            )
            text.get_window_extent()  # puts it in its place
            box = Text.get_window_extent(text)  # without the line to it
            is_inside = inside.contains(box.x0, box.y0) and inside.contains(box.x1, box.y1)
            if is_inside and not any(box.overlaps(other) for other in taken):
                taken.append(box)
                break
            text.remove()


def _boxes(series: Sequence[Series], axes: Any) -> Iterator[Any]:
    """List what is drawn already: every point with its interval, and lines in small pieces."""
    from matplotlib.transforms import Bbox

    for one in series:
        places = one.places()
        for place, took in places.items():
            x, y = axes.transData.transform(place)
            (_, low), (_, high) = axes.transData.transform([(0, took.low), (0, took.high)])
            yield Bbox.from_extents(x - GAP, min(low, y - GAP), x + GAP, max(high, y + GAP))
        for piece in pairwise(sorted(places)) if len(one.form) > 1 else ():
            start, end = axes.transData.transform(piece)
            pieces = max(1, int(abs(end - start).max() / 4))
            for x, y in (start + (end - start) * index / pieces for index in range(pieces)):
                yield Bbox.from_extents(x - 1, y - 1, x + 1, y + 1)


# -- records ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Record:
    """Results of a benchmark, as plain values.

    Attributes:
        benchmark: the first part of the names of its files.
        explained: sentences that go into the JSON beside the values.
        machine: device, versions and how Python was set up.
    """

    benchmark: ClassVar[str]
    explained: ClassVar[Mapping[str, object]] = {}
    machine: Machine

    @property
    def name(self) -> str:
        """Of the files: benchmark, device, version of torch, and "public" where only public names of it are used."""
        device = "cpu" if self.machine["device"] == "cpu" else str(self.machine["device name"]).replace(" ", "-")
        end = "-public" if self.machine.get("names of torch") == "public" else ""
        return f"{self.benchmark}-{device}-torch{str(self.machine['torch']).partition('+')[0]}{end}"

    def to_json(self) -> str:
        return json.dumps({**asdict(self), **self.explained}, indent=1, ensure_ascii=False) + "\n"


def read(kind: type[Kind], path: Path) -> Kind:
    """Read what `Record.to_json` wrote."""
    record: Kind = _decoded(kind, json.loads(path.read_text(encoding="utf-8")))
    return record


def _decoded(kind: Any, value: Any) -> Any:
    """Return a value of JSON as what a field is annotated with."""
    if value is None:
        return None
    if is_dataclass(kind):
        hints = get_type_hints(kind)
        known = (item.name for item in fields(kind) if item.name in value)  # an older file lacks what came later
        return kind(**{name: _decoded(hints[name], value[name]) for name in known})
    outer, inner = get_origin(kind), get_args(kind)
    if outer in (Union, UnionType):
        return _decoded(inner[0], value)
    if outer in (list, tuple):
        return outer(_decoded(inner[0], item) for item in value)
    if outer is dict:
        return {key: _decoded(inner[1], item) for key, item in value.items()}
    return value


def write(directory: Path, name: str, **texts: str) -> Path:
    """Write files of this name, by their endings; return the path of one that has none."""
    directory.mkdir(parents=True, exist_ok=True)
    for ending, text in texts.items():
        (directory / f"{name}.{ending}").write_text(text, encoding="utf-8")
    return directory / name


def describe_machine(device: torch.device) -> Machine:
    """Describe what the figures hold for."""
    try:
        remat = version("torch_remat")
    except PackageNotFoundError:
        remat = None
    return {
        "device": device.type,
        "device name": torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name(),
        "cpu": cpu_name(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch_remat": remat,
        "names of torch": "private" if any(way.is_fast and not way.lost for way in ways) else "public",
        "threads": 1,
        "garbage collector": "enabled; what was alive before is frozen",
    }


def cpu_name() -> str:
    """As Linux knows it; elsewhere what Python does."""
    facts = Path("/proc/cpuinfo")
    lines = facts.read_text().splitlines() if facts.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def with_page(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options, with those for the results and for a page about them."""
    parser.add_argument("--out", type=Path, metavar="DIRECTORY", help="where results are, and are written")
    parser.add_argument("--page", type=Path, metavar="FILE", help="write a page about the results in DIRECTORY")
    options = parser.parse_args(arguments)
    if options.page and not options.out:
        parser.error("--page is about the results in a directory: give --out as well")
    return options


def names_of_models(known: Iterable[str], text: str) -> list[str]:
    """Return the names in an option, with commas between them, each one of `known`."""
    names = [name for name in text.split(",") if name]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise argparse.ArgumentTypeError(f"no model {', '.join(unknown)}; there are {', '.join(known)}")
    return names

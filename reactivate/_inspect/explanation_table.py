"""An explanation as a table: a row for each site, one for several that are alike."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence

from reactivate._inspect.entries import Entry, merged, total_seconds
from reactivate._modules.paths import THE_MODEL
from reactivate._region.accounts import in_words
from reactivate._text.table import Column, Row, Table
from reactivate._text.words import alike, counted

_COLUMNS = (
    Column("site"),
    Column("action"),
    Column("inputs", True),
    Column("guards", True),
    Column("results", True),
    Column("recomputed", True),
    Column("ms", True),
    Column("line"),
)
_FOLDED = ("region", "layer")  # kinds of which several that are alike share their rows


def table_of(regions: Sequence[Entry], rest: Sequence[Entry], title: str) -> Table:
    """Return the table of the outermost regions, and of what is kept outside of them."""
    rows = [*_rows(regions), *_rows(rest), _total([*regions, *rest])]
    return Table(*_without_empty(rows), title)


def _without_empty(rows: Sequence[Row]) -> tuple[list[Column], list[Row]]:
    """The columns in which there is anything, and the rows with these."""
    used = [
        index for index in range(len(_COLUMNS)) if any(row.cells[index : index + 1] not in ([], [""]) for row in rows)
    ]
    shorter = [
        dataclasses.replace(row, cells=[row.cells[index] for index in used if index < len(row.cells)]) for row in rows
    ]
    return [_COLUMNS[index] for index in used], shorter


def _rows(entries: Iterable[Entry], depth: int = 0, around: str = "") -> Iterator[Row]:
    """A row for each entry; one for several that are alike, with their sums."""
    for _, run in itertools.groupby(entries, _shape):
        group = list(run)
        yield Row(_cells(group, around), depth)
        if group[0].reason:
            yield Row([f"again, as {group[0].reason}"], depth + 1)
        yield from _rows(merged(group).inside, depth + 1, group[0].path)


def _shape(entry: Entry) -> object:
    """Return what two layers have in common that do the same; what shares no row has nothing in common with others."""
    if entry.kind not in _FOLDED:
        return object()
    return tuple(
        dataclasses.replace(item, path=item.path.removeprefix(entry.path), seconds=None, inside=())
        for item in entry.walk()
    )


def _cells(group: Sequence[Entry], around: str) -> list[str]:
    entry = merged(group)
    sizes = (entry.input_bytes, entry.snapshot_bytes, entry.result_bytes, entry.recomputed_bytes)
    what = ", inputs" if entry.kind == "region" else ""
    action = entry.action + (f"{what} to {entry.storage}" if entry.storage else "")
    return [
        _named(entry, alike([entry.path_inside(around) for entry in group]), around),
        action,
        *(in_words(size) if size else "" for size in sizes),
        milliseconds(entry.seconds),
        _short(entry.source),
    ]


def _named(entry: Entry, path: str, around: str) -> str:
    if entry.kind == "recomputed":
        return counted(entry.tensors, "tensor")
    if entry.kind == "outside":
        return f"{path or ('the layer itself' if around else THE_MODEL)}: {counted(entry.tensors, 'tensor')}"
    return " ".join(filter(None, (path, entry.name)))


def milliseconds(seconds: float | None) -> str:
    """Return the time of recomputations as a table has it: empty if there were none."""
    return "" if seconds is None else f"{1000 * seconds:.2f}"


def _short(source: str | None) -> str:
    """Without the folder and the function."""
    return "" if source is None else source.partition(" in ")[0].replace("\\", "/").rpartition("/")[2]


def _total(entries: Iterable[Entry]) -> Row:
    found = [item for entry in entries for item in entry.walk() if item.kind != "layer"]
    kept = [sum(getattr(entry, name) for entry in found) for name in ("input_bytes", "snapshot_bytes", "result_bytes")]
    recomputed = sum(entry.recomputed_bytes for entry in found if entry.kind == "region")
    sizes = (in_words(size) if size else "" for size in (*kept, recomputed))
    return Row(["all", "", *sizes, milliseconds(total_seconds(entry.seconds for entry in found))], is_total=True)

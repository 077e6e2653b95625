"""The result of `explain`: a tree of sites with their bytes, as values, as JSON, and as a table."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from reactivate._engine.accounts import in_words
from reactivate._text.table import Column, Row, Table
from reactivate._text.words import counted
from reactivate.errors import UsageError

VERSION = 1


@dataclass(frozen=True)
class Entry:
    """A site: a call, and what is kept or recomputed for it.

    Attributes:
        kind: "region"; "saved call" inside of a region, which its recomputation skips; "call run again", which was to be
            saved and cannot be skipped; "recomputed", the tensors of one line of the region;
            "outside", what autograd keeps for one line of the rest of the model.
        path: the module that is called, or in which the call is, as in `model.named_modules()`.
        name: what is called; for "recomputed" and "outside" empty.
        action: "recompute", "save", "keep".
        reason: why a saved call runs again, or None.
        source: the line of the call, "file:line in function"; None if no line of the user's is in between.
        storage: where a saved call keeps its results, or a region its inputs, if not where they were made.
        tensors: how many tensors are kept, or recomputed if it is "recomputed".
        input_bytes: of the inputs of a region.
        snapshot_bytes: of what guards keep: states of generators, buffers as they were.
        result_bytes: of the results of a saved call and of what it saved; of what is kept outside.
        recomputed_bytes: what is recomputed for the backward. Of a region it is the whole, which its
            "recomputed" entries divide up.
        seconds: what the recomputation of a region took; None where there was no such thing, or nothing was computed.
        inside: the sites inside of a region.
    """

    kind: str
    path: str
    name: str
    action: str
    reason: str | None = None
    source: str | None = None
    storage: str | None = None
    tensors: int = 0
    input_bytes: int = 0
    snapshot_bytes: int = 0
    result_bytes: int = 0
    recomputed_bytes: int = 0
    seconds: float | None = None
    inside: tuple[Entry, ...] = ()

    @property
    def kept_bytes(self) -> int:
        """Return the bytes kept for this site, without those of the sites inside."""
        return self.input_bytes + self.snapshot_bytes + self.result_bytes

    def walk(self) -> Iterator[Entry]:
        """Iterate over this site and everything inside."""
        yield self
        for entry in self.inside:
            yield from entry.walk()

    @classmethod
    def _from_json(cls, value: Mapping[str, Any]) -> Entry:
        inside = tuple(map(cls._from_json, value["inside"]))
        return cls(**{**value, "inside": inside})


@dataclass(frozen=True)
class Explanation:
    """The sites of a step and their bytes. Printed, it is a table.

    Attributes:
        regions: the outermost regions, in the order in which they ran.
        outside: what is kept outside of regions, parameters and buffers left out.
        is_fake: whether it ran on fake tensors: without memory, without compute, and without times.
    """

    regions: tuple[Entry, ...]
    outside: tuple[Entry, ...]
    is_fake: bool

    def walk(self) -> Iterator[Entry]:
        """Every entry, those inside of others too."""
        for entry in (*self.regions, *self.outside):
            yield from entry.walk()

    @property
    def kept_bytes(self) -> int:
        """All that is kept between forward and backward."""
        return sum(entry.kept_bytes for entry in self.walk())

    @property
    def outside_bytes(self) -> int:
        """Return the bytes that are kept outside of regions."""
        return sum(entry.kept_bytes for entry in self.outside)

    @property
    def offloaded_bytes(self) -> int:
        """Return the bytes that a storage keeps elsewhere."""
        return sum(entry.kept_bytes for entry in self.walk() if entry.storage is not None)

    @property
    def recomputed_bytes(self) -> int:
        """Return the bytes that are recomputed."""
        return sum(entry.recomputed_bytes for entry in self.walk() if entry.kind == "region")

    @property
    def seconds(self) -> float | None:
        """Return the seconds that all recomputations took, None on fake tensors."""
        return None if self.is_fake else sum(entry.seconds or 0.0 for entry in self.walk())

    def text(self, *, width: int | None = None, plain: bool = False) -> str:
        """The table.

        Args:
            width: in characters; that of the terminal if None, 120 where there is none.
            plain: without rich, as wide as it gets; so it is where rich is not installed.
        """
        columns, rows = _without_empty([*_rows(self.regions), *_rows(self.outside), _total(self)])
        return Table(columns, rows, _title(self)).text(width=width, plain=plain)

    def __str__(self) -> str:
        return self.text()

    def to_json(self) -> dict[str, Any]:
        """All of it in dicts, lists, texts and numbers; `from_json` takes it back."""
        return {
            "version": VERSION,
            "is_fake": self.is_fake,
            "kept_bytes": self.kept_bytes,
            "recomputed_bytes": self.recomputed_bytes,
            "regions": [dataclasses.asdict(entry) for entry in self.regions],
            "outside": [dataclasses.asdict(entry) for entry in self.outside],
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Explanation:
        """Make an explanation from what `to_json` returned.

        Raises:
            UsageError: it is of another version.
        """
        if value.get("version") != VERSION:
            raise UsageError(f"An explanation of version {value.get('version')!r}; this release reads {VERSION}.")
        regions, outside = (tuple(map(Entry._from_json, value[name])) for name in ("regions", "outside"))
        return cls(regions, outside, value["is_fake"])


# -- the table --------------------------------------------------------------------------------------------------------

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


def _without_empty(rows: Sequence[Row]) -> tuple[list[Column], list[Row]]:
    """The columns in which there is anything, and the rows with these."""
    used = [
        index for index in range(len(_COLUMNS)) if any(row.cells[index : index + 1] not in ([], [""]) for row in rows)
    ]
    shorter = [
        dataclasses.replace(row, cells=[row.cells[index] for index in used if index < len(row.cells)]) for row in rows
    ]
    return [_COLUMNS[index] for index in used], shorter


def _title(explanation: Explanation) -> str:
    parts = [f"{in_words(explanation.outside_bytes)} outside of regions"]
    if explanation.offloaded_bytes:
        parts.append(f"{in_words(explanation.offloaded_bytes)} offloaded")
    kept, recomputed = in_words(explanation.kept_bytes), in_words(explanation.recomputed_bytes)
    return f"Kept for the backward: {kept}, of which {' and '.join(parts)}. Recomputed: {recomputed}."


def _rows(entries: Iterable[Entry], depth: int = 0, around: str = "") -> Iterator[Row]:
    """A row for each entry; one for several that are alike, with their sums."""
    for alike in _grouped(entries):
        yield Row(_cells(alike, around), depth)
        if alike[0].reason:
            yield Row([f"again, as {alike[0].reason}"], depth + 1)
        inside = [_merged(items) for items in zip(*(entry.inside for entry in alike))]
        yield from _rows(inside, depth + 1, alike[0].path)


def _grouped(entries: Iterable[Entry]) -> Iterator[list[Entry]]:
    group: list[Entry] = []
    for entry in entries:
        if group and not (entry.kind == "region" and _shape(entry) == _shape(group[0])):
            yield group
            group = []
        group.append(entry)
    if group:
        yield group


def _shape(entry: Entry) -> tuple[Entry, ...]:
    """Return what two layers have in common that do the same."""
    return tuple(dataclasses.replace(item, path="", seconds=None, inside=()) for item in entry.walk())


def _merged(entries: Sequence[Entry]) -> Entry:
    timed = [entry.seconds for entry in entries if entry.seconds is not None]
    sums = {name: sum(getattr(entry, name) for entry in entries) for name in _SUMMED}
    return dataclasses.replace(entries[0], seconds=sum(timed) if timed else None, **sums)


_SUMMED = ("tensors", "input_bytes", "snapshot_bytes", "result_bytes", "recomputed_bytes")


def _cells(alike: Sequence[Entry], around: str) -> list[str]:
    entry = _merged(alike)
    path = entry.path.removeprefix(around).lstrip(".")  # as it is written inside of the region
    if len(alike) > 1:
        path = f"{path}…{alike[-1].path.rpartition('.')[2]} ({len(alike)} alike)"
    sizes = (entry.input_bytes, entry.snapshot_bytes, entry.result_bytes, entry.recomputed_bytes)
    what = ", inputs" if entry.kind == "region" else ""
    action = entry.action + (f"{what} to {entry.storage}" if entry.storage else "")
    return [
        _named(entry, path),
        action,
        *(in_words(size) if size else "" for size in sizes),
        "" if entry.seconds is None else f"{1000 * entry.seconds:.2f}",
        _short(entry.source),
    ]


def _named(entry: Entry, path: str) -> str:
    if entry.kind == "recomputed":
        return counted(entry.tensors, "tensor")
    if entry.kind == "outside":
        return f"{path or 'the model itself'}: {counted(entry.tensors, 'tensor')}"
    return " ".join(filter(None, (path, entry.name)))


def _short(source: str | None) -> str:
    """Without the folder and the function."""
    return "" if source is None else source.partition(" in ")[0].replace("\\", "/").rpartition("/")[2]


def _total(explanation: Explanation) -> Row:
    entries = list(explanation.walk())
    sizes = [sum(getattr(entry, name) for entry in entries) for name in _SUMMED[1:4]]
    seconds = explanation.seconds
    return Row(
        [
            "all",
            "",
            *(in_words(size) if size else "" for size in (*sizes, explanation.recomputed_bytes)),
            "" if seconds is None else f"{1000 * seconds:.2f}",
        ],
        is_total=True,
    )

"""The result of `explain`: a tree of sites with their bytes, as values, as JSON, and as a table."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from reactivate._inspect.entries import Entry, layer_of, merged
from reactivate._inspect.explanation_table import table_of
from reactivate._region.accounts import in_words
from reactivate._text.saving import Tabled, check_saved, no_such
from reactivate._text.table import Table
from reactivate._text.words import counted

VERSION = 1


@dataclass(frozen=True, repr=False)
class Explanation(Tabled):
    """The sites of a step and their bytes. Printed, it is a table.

    Attributes:
        regions: the outermost regions, in the order in which they ran.
        outside: what is kept outside of regions, parameters and buffers left out.
        is_fake: whether it ran on fake tensors: without memory, without compute, and without times.
        layers: the classes of the model's repeated layers, by their paths.
        spans: the paths of the members of each span of a `Sequential` that is a region, by its path.
    """

    regions: tuple[Entry, ...]
    outside: tuple[Entry, ...]
    is_fake: bool
    layers: Mapping[str, str] = field(default_factory=dict, hash=False)
    spans: Mapping[str, Sequence[str]] = field(default_factory=dict, hash=False)

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
    def outside_by_layer(self) -> tuple[Entry, ...]:
        """Return `outside`, with one entry for each layer: its sums, and inside of it the entries that these are made of."""
        found: list[Entry] = []
        for path, group in itertools.groupby(self.outside, lambda entry: layer_of(entry, self.layers)):
            entries = tuple(group)
            found += entries if path is None else [self._layer(path, entries)]
        return tuple(found)

    def _layer(self, path: str, entries: tuple[Entry, ...]) -> Entry:
        total = merged(entries)
        return dataclasses.replace(total, kind="layer", path=path, name=self.layers[path], source=None, inside=entries)

    @property
    def offloaded_bytes(self) -> int:
        """Return the bytes that storages have moved, or are moving; on fake tensors those that they would take in."""
        return sum(entry.offloaded_bytes for entry in self.walk())

    @property
    def recomputed_bytes(self) -> int:
        """Return the bytes that are recomputed."""
        return sum(entry.recomputed_bytes for entry in self.walk() if entry.kind == "region")

    @property
    def seconds(self) -> float | None:
        """Return the seconds that all recomputations took, None on fake tensors."""
        return None if self.is_fake else sum(entry.seconds or 0.0 for entry in self.walk())

    def table(self) -> Table:
        """The sites as a table: a row for each, one for several that are alike."""
        return table_of(self.regions, self.outside_by_layer, self.title)

    @property
    def title(self) -> str:
        """Say what is kept in all, where, and what is recomputed."""
        parts = [f"{in_words(self.outside_bytes)} outside of regions"]
        if self.offloaded_bytes:
            parts.append(f"{in_words(self.offloaded_bytes)} offloaded")
        kept, recomputed = in_words(self.kept_bytes), in_words(self.recomputed_bytes)
        return f"Kept for the backward: {kept}, of which {' and '.join(parts)}. Recomputed: {recomputed}."

    def __repr__(self) -> str:
        kept, recomputed = in_words(self.kept_bytes), in_words(self.recomputed_bytes)
        sites = f"{counted(len(self.regions), 'region')} and {counted(len(self.outside), 'site')} outside"
        return f"Explanation({kept} kept, {recomputed} recomputed: {sites})"

    def to_json(self) -> dict[str, Any]:
        """All of it in dicts, lists, texts and numbers; `from_json` takes it back."""
        return {
            "version": VERSION,
            "is_fake": self.is_fake,
            "kept_bytes": self.kept_bytes,
            "recomputed_bytes": self.recomputed_bytes,
            "regions": [dataclasses.asdict(entry) for entry in self.regions],
            "outside": [dataclasses.asdict(entry) for entry in self.outside],
            "layers": dict(self.layers),
            "spans": {path: list(members) for path, members in self.spans.items()},
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Explanation:
        """Make an explanation from what `to_json` returned.

        Raises:
            UsageError: it is not that, or of another version.
        """
        check_saved(value, "Explanation", VERSION)
        try:
            regions, outside = (tuple(map(Entry.from_json, value[name])) for name in ("regions", "outside"))
            spans = {path: tuple(members) for path, members in value.get("spans", {}).items()}
            return cls(regions, outside, value["is_fake"], dict(value.get("layers", {})), spans)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise no_such("Explanation", error) from None

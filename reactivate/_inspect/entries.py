"""Entries of an explanation: the sites of a step, with what is kept or recomputed for each."""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

SUMMED = ("tensors", "input_bytes", "snapshot_bytes", "result_bytes", "offloaded_bytes", "recomputed_bytes")


@dataclass(frozen=True)
class Entry:
    """A site: a call, and what is kept or recomputed for it.

    Attributes:
        kind: "region"; "saved call" inside of a region, which its recomputation skips; "call run again", which was to be
            saved and cannot be skipped; "recomputed", the tensors of one line of the region;
            "outside", what autograd keeps for one line of the rest of the model; "layer", the sums of the "outside" entries
            of one layer, which are inside of it.
        path: the module that is called, or in which the call is, as in `model.named_modules()`.
        name: what is called; for "recomputed" and "outside" empty. Of a layer its class.
        action: "recompute", "save", "keep".
        reason: why a saved call runs again, or None.
        source: the line of the call, "file:line in function"; None if no line of the user's is in between.
        storage: where a saved call keeps its results, or a region its inputs, if not where they were made.
        tensors: how many tensors are kept, or recomputed if it is "recomputed".
        input_bytes: of the inputs of a region.
        snapshot_bytes: of what guards keep: states of generators, buffers as they were.
        result_bytes: of the results of a saved call and of what it saved; of what is kept outside.
        offloaded_bytes: what of that a storage has moved, or is moving.
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
    offloaded_bytes: int = 0

    @property
    def kept_bytes(self) -> int:
        """Return the bytes kept for this site, without those of the sites inside."""
        return self.input_bytes + self.snapshot_bytes + self.result_bytes

    def path_inside(self, around: str) -> str:
        """Return the path as it is written inside of the region or the layer `around`."""
        return self.path.removeprefix(around).lstrip(".")

    def walk(self) -> Iterator[Entry]:
        """Iterate over this site and everything inside."""
        yield self
        for entry in self.inside:
            yield from entry.walk()

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Entry:
        """Make a site from what `dataclasses.asdict` returned."""
        inside = tuple(map(cls.from_json, value["inside"]))
        return cls(**{**value, "inside": inside})


def merged(entries: Sequence[Entry]) -> Entry:
    """Return the first of some sites that are alike, with the sums of all; the sites inside as well."""
    sums = {name: sum(getattr(entry, name) for entry in entries) for name in SUMMED}
    inside = tuple(merged(alike) for alike in zip(*(entry.inside for entry in entries)))
    return dataclasses.replace(
        entries[0], seconds=total_seconds(entry.seconds for entry in entries), inside=inside, **sums
    )


def total_seconds(seconds: Iterable[float | None]) -> float | None:
    """Return the sum of those that there are; None if there is none."""
    timed = [each for each in seconds if each is not None]
    return sum(timed) if timed else None


def layer_of(entry: Entry, layers: Container[str]) -> str | None:
    """Return the outermost of the layers, by its path, that an entry is, or is inside of; None if there is none."""
    names = entry.path.split(".")
    paths = (".".join(names[: number + 1]) for number in range(len(names)))
    return next((path for path in paths if path in layers), None)

"""Two explanations side by side: of the plain model, and of the model under a policy."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from reactivate._inspect.entries import Entry, layer_of, total_seconds
from reactivate._inspect.explanation import Explanation
from reactivate._inspect.explanation_table import milliseconds
from reactivate._modules.paths import THE_MODEL, is_below
from reactivate._region.accounts import in_words
from reactivate._text.saving import Tabled, check_saved, no_such
from reactivate._text.table import Column, Row, Table
from reactivate._text.words import alike, counted

VERSION = 1
MOST_CALLS = 3  # saved calls that are named; more are counted

_COLUMNS = (
    Column("layer"),
    Column("what is done"),
    Column("plain", True),
    Column("with the policy", True),
    Column("recomputed", True),
    Column("ms", True),
)


@dataclass(frozen=True)
class LayerChange:
    """A layer, or what is kept outside of layers by one module, without and with a policy.

    Attributes:
        path, kind: the module, and the name of its class if it is a layer.
        action: what the policy does with it: "keep", "recompute", the regions inside, and the calls that are saved; or the
            region around it.
        before_bytes, after_bytes: kept for the backward.
        recomputed_bytes: what is recomputed under the policy.
        seconds: how long that takes; None where nothing is recomputed, or nothing was computed.
    """

    path: str
    kind: str
    action: str
    before_bytes: int
    after_bytes: int
    recomputed_bytes: int
    seconds: float | None


@dataclass(frozen=True, repr=False)
class Comparison(Tabled):
    """The explanations of a model without and with a policy. Printed, it is a table.

    Attributes:
        before: of the plain model, without regions.
        after: of the model under the policy.
    """

    before: Explanation
    after: Explanation

    @property
    def changes(self) -> tuple[LayerChange, ...]:
        """The layers, and modules outside of them that keep something. Bytes add up to those of the explanations."""
        layers = {**self.before.layers, **self.after.layers}
        before, after = (_by_layer(found, layers) for found in (self.before, self.after))
        regions = {entry.path: self.after.spans.get(entry.path, (entry.path,)) for entry in self.after.regions}
        return tuple(
            LayerChange(
                path,
                layers.get(path, ""),
                _action(path, after.get(path, ()), regions),
                sum(item.kept_bytes for item in _walk(before.get(path, ()))),
                sum(item.kept_bytes for item in _walk(after.get(path, ()))),
                sum(item.recomputed_bytes for item in _walk(after.get(path, ())) if item.kind == "region"),
                total_seconds(item.seconds for item in _walk(after.get(path, ()))),
            )
            for path in dict.fromkeys([*before, *after])
        )

    @property
    def runs(self) -> tuple[tuple[LayerChange, ...], ...]:
        """The changes, those of layers that follow one another and are alike together."""
        return tuple(tuple(run) for _, run in itertools.groupby(self.changes, _shape))

    @property
    def title(self) -> str:
        """Say what is kept in all, without and with the policy."""
        before, after = self.before.kept_bytes, self.after.kept_bytes
        percent = f" ({100 * (after / before - 1):+.1f} %)" if before else ""
        seconds = self.after.seconds
        took = f" in {1000 * seconds:.2f} ms" if seconds else ""
        return (
            f"Kept for the backward: plain {in_words(before)}, with the policy {in_words(after)}{percent}. Recomputed: "
            f"{in_words(self.after.recomputed_bytes)}{took}."
        )

    def table(self) -> Table:
        """The changes as a table: a row for several layers that are alike, with their sums; then one for all."""
        rows = [Row(_cells(run)) for run in self.runs]
        return Table(_COLUMNS, [*rows, Row(["all", "", *_figures(self.changes)], is_total=True)], self.title)

    def __repr__(self) -> str:
        return f"Comparison(before={self.before!r}, after={self.after!r})"

    def to_json(self) -> dict[str, Any]:
        """All of it in dicts, lists, texts and numbers; `from_json` takes it back."""
        return {"version": VERSION, "before": self.before.to_json(), "after": self.after.to_json()}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Comparison:
        """Make a comparison from what `to_json` returned.

        Raises:
            UsageError: it is not that, or of another version.
        """
        check_saved(value, "Comparison", VERSION)
        try:
            return cls(Explanation.from_json(value["before"]), Explanation.from_json(value["after"]))
        except KeyError as error:
            raise no_such("Comparison", error) from None


def _by_layer(explanation: Explanation, layers: Mapping[str, str]) -> dict[str, list[Entry]]:
    """Return the outermost entries by the layer that they are in, or by their module where that is in none."""
    found: dict[str, list[Entry]] = {}
    for entry in (*explanation.regions, *explanation.outside):
        layer = layer_of(entry, layers)
        found.setdefault(entry.path if layer is None else layer, []).append(entry)
    return found


def _walk(entries: Sequence[Entry]) -> Iterator[Entry]:
    for entry in entries:
        yield from entry.walk()


def _action(path: str, entries: Sequence[Entry], regions: Mapping[str, Sequence[str]]) -> str:
    """Say what is done with a layer; of regions, the paths of the modules that they are made of are given."""
    around = next(
        (
            region
            for region, members in regions.items()
            if path != region and any(is_below(path, member) for member in members)
        ),
        None,
    )
    if around is not None:
        return f"inside of {around or THE_MODEL}"
    inside = [entry.path_inside(path) for entry in entries if entry.kind == "region"]
    if not inside:
        return "keep"
    calls = [f"{item.path_inside(path)} {item.name}".strip() for item in _walk(entries) if item.kind == "saved call"]
    saved = list(dict.fromkeys(calls))
    but = f"but {', '.join(saved) if len(saved) <= MOST_CALLS else counted(len(saved), 'saved call')}" if saved else ""
    return " ".join(filter(None, ["recompute", ", ".join(dict.fromkeys(filter(None, inside))), but]))


def _shape(change: LayerChange) -> tuple[object, ...]:
    """Return what layers have in common that share a row; what is outside of layers shares none."""
    own = None if change.kind else change.path
    return own, change.kind, change.action, change.before_bytes, change.after_bytes, change.recomputed_bytes


def _cells(run: Sequence[LayerChange]) -> list[str]:
    name = alike([change.path or THE_MODEL for change in run])
    return [" ".join(filter(None, [name, run[0].kind])), run[0].action, *_figures(run)]


def _figures(run: Sequence[LayerChange]) -> list[str]:
    before, after = (sum(getattr(change, name) for change in run) for name in ("before_bytes", "after_bytes"))
    recomputed = sum(change.recomputed_bytes for change in run)
    times = milliseconds(total_seconds(change.seconds for change in run))
    return [in_words(before), in_words(after), in_words(recomputed) if recomputed else "", times]

"""Entries of an explanation while its step runs: tensors may be let go again before they count."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from weakref import ref

from torch import Tensor

from reactivate._inspect.entries import Entry
from reactivate._inspect.places import SourcePlace
from reactivate._region.region import Region
from reactivate._types import Device


class Token:
    """A token in the place of a saved tensor: it is alive as long as the tensor is kept."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


@dataclass
class Draft:
    """An entry that is being made."""

    kind: str
    place: SourcePlace
    name: str = ""
    action: str = "keep"
    reason: str | None = None
    storage: str | None = None
    figures: dict[str, Any] = field(default_factory=dict)
    inside: list[Draft] = field(default_factory=list)

    def put_in(self, storage: Any) -> None:
        """Take note of where it is kept."""
        behind = getattr(storage, "storage", None)
        in_another = "" if behind is None or isinstance(behind, Device) else f" in {type(behind).__name__}"
        self.storage = f"{type(storage).__name__}{in_another}"

    def add(self, name: str, number: float) -> None:
        self.figures[name] = self.figures.get(name, 0) + number

    def entry(self) -> Entry:
        path, source = self.place
        inside = tuple(draft.entry() for draft in self.inside)
        what = self.kind, path, self.name, self.action, self.reason, source, self.storage
        return Entry(*what, inside=inside, **self.figures)


@dataclass
class KeptTensor:
    """A tensor is kept: by whom, and under which figure it counts. No draft: unknown so far."""

    holder: ref[Token]
    draft: Draft | None
    figure: str


@dataclass
class RegionEnd:
    """A region has ended, and keeps what autograd does not know of."""

    region: ref[Region]
    draft: Draft
    calls: dict[int, Draft]  # by the number of the call

"""One step of a model, and who kept what in it.

One forward pass runs under saved-tensor hooks, which see everything that autograd keeps and that no region takes: what
the rest of the model saves, the inputs of regions, and what saved calls leave. An observer is told of each region, whose
guards keep what autograd does not know of. Then a backward runs, in which the regions recompute: what is in their slots
right after a recomputation is what it recomputed.

Memory is counted in storages, in the order in which they were first kept, each once over everything.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from operator import attrgetter
from sys import _getframe
from types import CodeType
from typing import Any
from weakref import WeakSet, ref

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import Module

from reactivate._backends import synchronize
from reactivate._inspect.entries import Entry
from reactivate._inspect.explanation import Explanation
from reactivate._inspect.places import SourcePlace, SourcePlaces, module_of
from reactivate._inspect.step import Step, gradients_of, leaves_of
from reactivate._modules.blocks import blocks_of
from reactivate._modules.spans import paths_in
from reactivate._passes.current import is_recomputed, running_now
from reactivate._passes.observing import keeping, observed_by
from reactivate._region.accounts import (
    Ledger,
    copied_inputs,
    held_by,
    held_by_guards,
    kept_of,
    pieces_in,
    stored_inputs,
)
from reactivate._region.naming import name_of, saved_at
from reactivate._region.region import Region
from reactivate._saved_calls.saved_call import Kept, SavedCall
from reactivate._snapshot.call import Call
from reactivate._torch.ops import flatten
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


class ExplainedStep(Step):
    """One step of a model, and who kept what in it."""

    def __init__(
        self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], around: set[CodeType], is_fake: bool
    ) -> None:
        super().__init__(model, args, kwargs)
        self._is_fake = is_fake
        roots = [model] if isinstance(model, Module) else Call(model, args, kwargs).roots
        self._places = SourcePlaces(roots, around)
        self._roots = roots
        self._ledger = Ledger()
        self._pieces: WeakSet[Any] = WeakSet()  # that were counted
        self._events: list[KeptTensor | RegionEnd] = []
        self._regions: list[Draft] = []
        self._outside: dict[SourcePlace, Draft] = {}
        # Of regions whose forward pass runs, by their ids: what they keep, and the sites inside.
        self._inputs: defaultdict[int, list[KeptTensor]] = defaultdict(list)
        self._inside: defaultdict[int | None, list[Draft | tuple[SavedCall, SourcePlace]]] = defaultdict(list)
        self._results: dict[int, KeptTensor] = {}  # by the id of a `Kept`
        self._drafts: dict[int, RegionEnd] = {}  # by the id of the region
        # Of the recomputations that run: when they began, and what those inside took.
        self._clocks: list[list[float]] = []

    def explanation(self) -> Explanation:
        """Return the explanation of the step that ran."""
        outside = [draft.entry() for draft in self._outside.values() if draft.figures]
        layers = {path: type(block).__name__ for root in self._roots for path, block in blocks_of(root).items()}
        regions = tuple(draft.entry() for draft in self._regions)
        spans = {
            entry.path: members
            for entry in regions
            for root in self._roots
            if (members := paths_in(root, entry.path)) is not None
        }
        return Explanation(regions, tuple(outside), self._is_fake, layers, spans)

    def _run(self, model: Callable[..., Any], run: Any) -> None:
        self._ledger = Ledger(self._known())
        with observed_by(self):
            with saved_tensors_hooks(self._pack, attrgetter("tensor")):
                args, kwargs = self.given()
                output = model(*args, **kwargs)
            roots = self._roots_of(leaves_of("output", output).values())
            self._count_kept()
            gradients_of(roots, list(self.inputs.values()))

    def _known(self) -> Iterator[Tensor]:
        """List what is there anyway: parameters, buffers, and leaves that the function closes over."""
        for root in self._roots:
            yield from root.parameters()
            yield from root.buffers()
        given = set(map(id, flatten((self.args, self.kwargs))[0]))
        yield from (leaf for leaf in self.inputs.values() if id(leaf) not in given)

    # -- the forward pass ---------------------------------------------------------------------------------------------

    def _pack(self, tensor: Tensor) -> Token:
        """Autograd keeps `tensor`."""
        holder = Token(tensor)
        event = KeptTensor(ref(holder), None, "result_bytes")
        self._events.append(event)
        owner = keeping.owner
        if isinstance(owner, Kept):
            self._results[id(owner)] = event
            return holder
        if owner is not None:
            event.figure = "input_bytes"
            self._inputs[id(owner)].append(event)
            return holder
        place = self._places.at(_getframe(1))
        event.draft = self._outside.setdefault(place, Draft("outside", place))
        return holder

    def call_begins(self, call: SavedCall) -> None:
        """A call is to be saved."""
        if not is_recomputed():
            self._inside[_region_now()].append((call, self._places.at(_getframe(1))))

    def forward_done(self, region: Region) -> None:
        """A region's forward pass is over."""
        if is_recomputed():
            return
        frame = _getframe(1)
        module = module_of(region)
        name = name_of(region) if module is None else type(module).__name__
        draft = Draft("region", self._places.of_region(region, frame), name, "recompute")
        for event in self._inputs.pop(id(region), ()):
            event.draft = draft
        calls: dict[int, Draft] = {}
        for item in self._inside.pop(id(region.identity), ()):
            if isinstance(item, Draft):
                draft.inside.append(item)
            elif item[0] in region.saved_calls:
                call = calls[item[0].number] = self._saved_call(region, *item)
                draft.inside.append(call)
        done = self._drafts[id(region)] = RegionEnd(ref(region), draft, calls)
        self._events.append(done)
        around = _region_now()
        (self._regions if around is None else self._inside[around]).append(draft)

    def _saved_call(self, region: Region, call: SavedCall, place: SourcePlace) -> Draft:
        draft = Draft("saved call", place, call.label, "save")
        if call.path is not None:
            draft.place = call.path, place[1]
            draft.name = call.label.removeprefix(call.path).strip(" ()")
        if call.reason is not None:
            draft.kind, draft.action, draft.reason = "call run again", "recompute", call.reason
        for kept in kept_of(region, call):
            if not isinstance(kept.storage, Device):
                draft.put_in(kept.storage)
            event = self._results.pop(id(kept), None)
            if event is not None:
                event.draft = draft
        return draft

    def _count_kept(self) -> None:
        """The forward pass is over: count what is still kept."""
        for event in self._events:
            if isinstance(event, RegionEnd):
                self._count_rest(event)
                continue
            holder = event.holder()
            if holder is not None and event.draft is not None:
                self._enter(event.draft, event.figure, holder.tensor)
        self._events.clear()

    def _count_rest(self, event: RegionEnd) -> None:
        region = event.region()
        if region is None:
            return
        for tensor in copied_inputs(region):
            self._enter(event.draft, "input_bytes", tensor)
        for spec in stored_inputs(region):
            event.draft.put_in(spec.storage)
            self._enter_handle(event.draft, "input_bytes", spec.handle(), spec.storage)
        for tensor in held_by_guards(region):
            self._enter(event.draft, "snapshot_bytes", tensor)
        for call in region.saved_calls:
            for kept in kept_of(region, call):
                self._enter_handle(event.calls[call.number], "result_bytes", kept.handle, kept.storage)

    def _enter_handle(self, draft: Draft, figure: str, handle: Any, storage: Any) -> None:
        """Count what a storage took, in memory and elsewhere.

        A storage that counts what it moves leaves some of it where it was. Of another one all that it took is elsewhere.
        """
        is_moved = not isinstance(storage, Device) and not hasattr(type(storage), "traffic")
        pieces = list(pieces_in(handle))
        for tensor in held_by(handle, set(map(id, pieces))):
            self._enter(draft, figure, tensor, is_moved=is_moved)
        for piece in pieces:
            for tensor in held_by(piece):
                self._enter(draft, figure, tensor, is_moved=piece.stays is None)
            if piece not in self._pieces:
                self._pieces.add(piece)
                self._add(draft, figure, piece.stored_bytes, is_moved=piece.stays is None)

    def _enter(self, draft: Draft, figure: str, tensor: Tensor, *, is_moved: bool = False) -> None:
        self._add(draft, figure, self._ledger.enter(tensor), is_moved=is_moved)

    @staticmethod
    def _add(draft: Draft, figure: str, size: int, *, is_moved: bool) -> None:
        if size:
            draft.add(figure, size)
            draft.add("tensors", 1)
            draft.add("offloaded_bytes", size if is_moved else 0)

    # -- the backward -------------------------------------------------------------------------------------------------

    def recomputation_begins(self, region: Region) -> None:
        """A region is about to be recomputed."""
        self._clocks.append([_now(), 0.0])

    def recomputation_done(self, region: Region) -> None:
        """A region was recomputed, and what the recomputation made is in its slots."""
        began, others = self._clocks.pop()
        seconds = _now() - began
        if self._clocks:
            self._clocks[-1][1] += seconds
        event = self._drafts.get(id(region))
        if event is None or event.region() is not region:
            return
        if not self._is_fake:
            event.draft.add("seconds", seconds - others)
        if "recomputed_bytes" not in event.draft.figures:
            self._count_recomputed(region, event.draft)

    def _count_recomputed(self, region: Region, draft: Draft) -> None:
        draft.add("recomputed_bytes", 0)
        lines: dict[str | None, Draft] = {}
        for number, (tensor, _) in sorted(region.values.items()):
            size = self._ledger.enter(tensor)
            if size:
                site = saved_at(region, number)
                source = self._places.line(site)
                place = draft.place[0], source
                line = lines.setdefault(source, Draft("recomputed", place, action="recompute"))
                for item in (draft, line):
                    item.add("recomputed_bytes", size)
                line.add("tensors", 1)
        draft.inside += lines.values()


def _region_now() -> int | None:
    """Return the id of the identity of the region whose forward pass runs, None outside of regions."""
    place = running_now()
    return None if place is None else id(place[0])


def _now() -> float:
    synchronize()
    return time.perf_counter()

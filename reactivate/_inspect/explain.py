"""`explain`: what is kept for the backward, by whom, and what is recomputed.

One forward pass runs under saved-tensor hooks, which see everything that autograd keeps and that no region takes: what
the rest of the model saves, the inputs of regions, and what saved calls leave. An observer is told of each region, whose
guards keep what autograd does not know of. Then a backward runs, in which the regions recompute: what is in their slots
right after a recomputation is what it recomputed.

Memory is counted in storages, in the order in which they were first kept, each once over everything.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from sys import _getframe
from types import CodeType, FrameType
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import Module

from reactivate._arguments import example_of
from reactivate._backends import accelerator
from reactivate._engine.accounts import Ledger, copied_inputs, held_by, held_by_guards, kept_of
from reactivate._engine.inputs.capture import Capture
from reactivate._engine.kept_calls.kept import Kept, SavedSite
from reactivate._engine.mismatch.naming import name_of, saved_at
from reactivate._engine.recompute import is_recomputing
from reactivate._engine.record import Record, observed_by
from reactivate._engine.region import Region
from reactivate._engine.run import run
from reactivate._engine.sites import line_of, user_frame
from reactivate._inspect.explanation import Entry, Explanation
from reactivate._inspect.fake import faked, has_no_memory, tensors_of
from reactivate._inspect.step import Step, cotangents, leaves_of
from reactivate._torch.containers import flatten
from reactivate._torch.modules import MODULE_CALL_CODE
from reactivate._types import Device
from reactivate._view import original_of
from reactivate.errors import UsageError


def explain(
    model: Callable[..., Any],
    args: Any = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    fake: bool | None = None,
) -> Explanation:
    """List what a step of `model` keeps for its backward, by site and source line, and what it recomputes.

    A forward and a backward run, on real tensors (twice, for the times) or on fake ones, which have sizes and no memory.
    Gradients, buffers, attributes and generators are then as they were.

    Args:
        model: a module or a function: with a policy applied, with regions of its own, or plain.
        args: the arguments of one call, as a tuple or a list; a dict holds keyword arguments, a lone tensor is one
            argument.
        kwargs: keyword arguments.
        fake: run on fake tensors; by default where arguments or parameters are fake or on the meta device.

    Returns:
        A tree of sites. `print` shows a table of it.

    Raises:
        UsageError: nothing that comes out requires a gradient.

    Example:
        >>> import torch, reactivate
        >>> from reactivate import policies
        >>> model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()) for _ in range(2)))
        >>> handle = reactivate.apply(model, policies.first_match(policies.save_ops("linear"), policies.full()))
        >>> explanation = reactivate.explain(model, torch.randn(4, 8))
        >>> [(entry.path, entry.kind, entry.kept_bytes) for entry in explanation.regions[0].walk()][:2]
        [('0', 'region', 128), ('0.0', 'saved call', 128)]
    """
    args, kwargs = example_of("explain", model, args, kwargs)
    around = _codes_around(_getframe(1))
    is_fake = any(map(has_no_memory, tensors_of(model, args, kwargs))) if fake is None else fake
    with ExitStack() as stack:
        if is_fake:
            args, kwargs = stack.enter_context(faked(model, args, kwargs, _device_of(args, kwargs)))
        else:
            Step(model, args, kwargs).run(model)  # the first run of anything is slow, and times are wanted
            torch.clear_autocast_cache()  # a step of its own casts its weights itself
        trace = _ExplainedStep(model, args, kwargs, around, is_fake)
        trace.run(model)
    return trace.explanation()


def _device_of(args: Any, kwargs: Any) -> torch.device | None:
    """Return the device of the arguments: a model without memory counts as there, too. None if they have no memory either."""
    devices = [leaf.device for leaf in leaves_of("args", (args, kwargs)).values() if not leaf.is_meta]
    return devices[0] if devices else None


def _codes_around(frame: FrameType | None) -> set[CodeType]:
    codes = set()
    while frame is not None:
        codes.add(frame.f_code)
        frame = frame.f_back
    return codes


SourcePlace = tuple[str, "str | None"]  # module path, source line


class _Holder:
    """A token in the place of a saved tensor: it is alive as long as the tensor is kept."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def _tensor_of(holder: _Holder) -> Tensor:
    return holder.tensor


@dataclass
class _Draft:
    """An entry that is being made."""

    kind: str
    place: SourcePlace
    name: str = ""
    action: str = "keep"
    reason: str | None = None
    storage: str | None = None
    figures: dict[str, Any] = field(default_factory=dict)
    inside: list[_Draft] = field(default_factory=list)

    def add(self, name: str, number: float) -> None:
        self.figures[name] = self.figures.get(name, 0) + number

    def entry(self) -> Entry:
        path, source = self.place
        inside = tuple(draft.entry() for draft in self.inside)
        return Entry(
            self.kind, path, self.name, self.action, self.reason, source, self.storage, inside=inside, **self.figures
        )


@dataclass
class _Event:
    """A tensor is kept: by whom, and under which figure it counts. No draft: nobody knows yet."""

    holder: ref[_Holder]
    draft: _Draft | None
    figure: str


@dataclass
class _RegionEvent:
    """A region has ended, and keeps what autograd does not know of."""

    record: ref[Record]
    draft: _Draft
    calls: dict[int, _Draft]  # by the number of the call


class _ExplainedStep(Step):
    """One step of a model, and who kept what in it."""

    def __init__(
        self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], around: set[CodeType], is_fake: bool
    ) -> None:
        super().__init__(model, args, kwargs)
        self._around = around
        self._is_fake = is_fake
        roots = [model] if isinstance(model, Module) else Capture(model, args, kwargs).roots
        self._paths = {id(original_of(module)): path for root in roots for path, module in root.named_modules()}
        self._roots = roots
        self._ledger = Ledger()
        self._events: list[_Event | _RegionEvent] = []
        self._regions: list[_Draft] = []
        self._outside: dict[SourcePlace, _Draft] = {}
        # Of regions whose forward pass runs, by their ids: what they keep, and the sites inside.
        self._inputs: defaultdict[int, list[_Event]] = defaultdict(list)
        self._inside: defaultdict[int, list[_Draft | tuple[SavedSite, SourcePlace]]] = defaultdict(list)
        self._results: dict[int, _Event] = {}  # by the id of a `Kept`
        self._drafts: dict[int, _RegionEvent] = {}  # by the id of the record
        # Of the recomputations that run: when they began, and what those inside took.
        self._clocks: list[list[float]] = []

    def explanation(self) -> Explanation:
        """Return the explanation of the step that ran."""
        outside = [draft.entry() for draft in self._outside.values() if draft.figures]
        return Explanation(tuple(draft.entry() for draft in self._regions), tuple(outside), self._is_fake)

    def _run(self, model: Callable[..., Any], run: Any) -> None:
        self._ledger = Ledger(self._known())
        with observed_by(self):
            with saved_tensors_hooks(self._pack, _tensor_of):
                output = model(*self.args, **self.kwargs)
            roots = [leaf for leaf in leaves_of("output", output).values() if leaf.requires_grad]
            if not roots or not self.inputs:
                raise UsageError("Nothing that the model returns requires a gradient, so there is nothing to explain.")
            self._count_kept()
            torch.autograd.grad(roots, list(self.inputs.values()), cotangents(roots), allow_unused=True)

    def _known(self) -> Iterator[Tensor]:
        """List what is there anyway: parameters, buffers, and leaves that the function closes over."""
        for root in self._roots:
            yield from root.parameters()
            yield from root.buffers()
        given = set(map(id, flatten((self.args, self.kwargs))[0]))
        yield from (leaf for leaf in self.inputs.values() if id(leaf) not in given)

    # -- the forward pass ---------------------------------------------------------------------------------------------

    def _pack(self, tensor: Tensor) -> _Holder:
        """Autograd keeps `tensor`."""
        holder = _Holder(tensor)
        event = _Event(ref(holder), None, "result_bytes")
        self._events.append(event)
        frame: FrameType | None = _getframe(1)
        here = frame
        while frame is not None:
            if frame.f_code is Kept.settle.__code__:
                self._results[id(frame.f_locals["self"])] = event
                return holder
            if frame.f_code is Region.begin.__code__:
                event.figure = "input_bytes"
                self._inputs[id(frame.f_locals["self"])].append(event)
                return holder
            frame = frame.f_back
        place = self._place(here)
        event.draft = self._outside.setdefault(place, _Draft("outside", place))
        return holder

    def call_begins(self, site: SavedSite) -> None:
        """A call is to be saved."""
        frame = _getframe(1)
        if not is_recomputing():
            region = next(_regions_around(frame), None)
            self._inside[id(region)].append((site, self._place(frame)))

    def forward_done(self, record: Record) -> None:
        """A region's forward pass is over."""
        if is_recomputing():
            return
        frame = _getframe(1)
        module = _module_of(record)
        name = name_of(record) if module is None else type(module).__name__
        draft = _Draft("region", self._place_of_region(record, frame), name, "recompute")
        for event in self._inputs.pop(id(record), ()):
            event.draft = draft
        calls: dict[int, _Draft] = {}
        for item in self._inside.pop(id(record), ()):
            if isinstance(item, _Draft):
                draft.inside.append(item)
            elif item[0] in record.sites:
                call = calls[item[0].number] = self._saved_call(record, *item)
                draft.inside.append(call)
        done = self._drafts[id(record)] = _RegionEvent(ref(record), draft, calls)
        self._events.append(done)
        around = next((region for region in _regions_around(frame) if region is not record), None)
        (self._regions if around is None else self._inside[id(around)]).append(draft)

    def _saved_call(self, record: Record, site: SavedSite, place: SourcePlace) -> _Draft:
        draft = _Draft("saved call", place, site.label, "save")
        if site.path is not None:
            draft.place = site.path, place[1]
            draft.name = site.label.removeprefix(site.path).strip(" ()")
        if site.reason is not None:
            draft.kind, draft.action, draft.reason = "call run again", "recompute", site.reason
        for kept in kept_of(record, site):
            if not isinstance(kept.storage, Device):
                draft.storage = type(kept.storage).__name__
            event = self._results.pop(id(kept), None)
            if event is not None:
                event.draft = draft
        return draft

    def _count_kept(self) -> None:
        """The forward pass is over: count what is still kept."""
        for event in self._events:
            if isinstance(event, _RegionEvent):
                self._count_rest(event)
                continue
            holder = event.holder()
            if holder is not None and event.draft is not None:
                self._enter(event.draft, event.figure, holder.tensor)
        self._events.clear()

    def _count_rest(self, event: _RegionEvent) -> None:
        record = event.record()
        if record is None:
            return
        for tensor in copied_inputs(record):
            self._enter(event.draft, "input_bytes", tensor)
        for tensor in held_by_guards(record):
            self._enter(event.draft, "snapshot_bytes", tensor)
        for site in record.sites:
            for kept in kept_of(record, site):
                for tensor in held_by(kept.handle):  # what a storage took
                    self._enter(event.calls[site.number], "result_bytes", tensor)

    def _enter(self, draft: _Draft, figure: str, tensor: Tensor) -> None:
        size = self._ledger.enter(tensor)
        if size:
            draft.add(figure, size)
            draft.add("tensors", 1)

    # -- the backward -------------------------------------------------------------------------------------------------

    def recomputation_begins(self, record: Record) -> None:
        """A region is about to be recomputed."""
        self._clocks.append([_now(), 0.0])

    def recomputation_done(self, record: Record) -> None:
        """A region was recomputed, and what the recomputation made is in its slots."""
        began, others = self._clocks.pop()
        seconds = _now() - began
        if self._clocks:
            self._clocks[-1][1] += seconds
        event = self._drafts.get(id(record))
        if event is None or event.record() is not record:
            return
        if not self._is_fake:
            event.draft.add("seconds", seconds - others)
        if "recomputed_bytes" not in event.draft.figures:
            self._count_recomputed(record, event.draft)

    def _count_recomputed(self, record: Record, draft: _Draft) -> None:
        draft.add("recomputed_bytes", 0)
        lines: dict[str | None, _Draft] = {}
        for number, (reference, *_) in enumerate(record.saved):
            slot = reference()
            size = 0 if slot is None or slot.value is None else self._ledger.enter(slot.value)
            if size:
                site = saved_at(record, number)
                source = None if site[0] in self._around else line_of(site)
                place = draft.place[0], source
                line = lines.setdefault(source, _Draft("recomputed", place, action="recompute"))
                for item in (draft, line):
                    item.add("recomputed_bytes", size)
                line.add("tensors", 1)
        draft.inside += lines.values()

    # -- places -------------------------------------------------------------------------------------------------------

    def _place(self, frame: FrameType | None) -> SourcePlace:
        """The module that runs, and the line of the user's."""
        here, path = frame, None
        while frame is not None and path is None:
            if frame.f_code is MODULE_CALL_CODE:
                path = self._paths.get(id(frame.f_locals["self"]))
            frame = frame.f_back
        return path or "", self._line(here)

    def _line(self, frame: FrameType | None) -> str | None:
        found = None if frame is None else user_frame(frame)
        return None if found is None or found.f_code in self._around else line_of((found.f_code, found.f_lasti))

    def _place_of_region(self, record: Record, frame: FrameType) -> SourcePlace:
        path, line = self._place(frame)
        return self._paths.get(id(_module_of(record)), path), line


def _regions_around(frame: FrameType | None) -> Iterator[Region]:
    """The regions whose forward pass runs, innermost first."""
    while frame is not None:
        if frame.f_code is run.__code__:
            region = frame.f_locals.get("region")
            if region is not None:
                yield region
        frame = frame.f_back


def _module_of(record: Record) -> Module | None:
    """The module that is the region, if it is one."""
    fn = record.fn
    owner = fn if isinstance(fn, Module) else getattr(fn, "__self__", None)
    return owner if isinstance(owner, Module) else None


def _now() -> float:
    backend = accelerator()
    if backend is not None and backend.is_initialized():
        torch.accelerator.synchronize()
    return time.perf_counter()

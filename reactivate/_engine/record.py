"""The record of one call of a checkpointed function, between its forward pass and its backward."""

from __future__ import annotations

import weakref
from _thread import RLock
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import Context, ContextVar
from dataclasses import dataclass, field, replace
from operator import attrgetter
from types import CodeType
from typing import Any, Protocol

import torch
from torch import Tensor

from reactivate._backends import Fence
from reactivate._engine.inputs.walk import Input
from reactivate._engine.kept_calls.choice import Choice
from reactivate._engine.mismatch.oplog import OpLog
from reactivate._engine.state.contents import Note
from reactivate._engine.state.gradients import Gradients
from reactivate._engine.state.region_calls import RegionCall
from reactivate._engine.state.tensor_states import TensorStates
from reactivate._torch.autograd import FUNCTION_APPLY_CODE, is_function_running
from reactivate._types import DEVICE, Guard, Storage, Unrestored
from reactivate.errors import ReactivateError

Before = Callable[[Any], Any]
After = Callable[[Any], Any]
Recomputation = Callable[[Any], "AbstractContextManager[Any] | None"]


@dataclass(frozen=True)
class Options:
    """The options of regions; one object for all calls of one checkpointed function."""

    guards: tuple[Guard, ...] = ()
    early_stop: bool = True
    determinism: str = "first"
    name: str | None = None
    choice: Choice | None = None
    in_graph: Any = None  # the same for torch.compile: a function for the contexts around the traced region
    inputs: Storage = DEVICE
    befores: tuple[Before, ...] = field(init=False, repr=False, compare=False)
    afters: tuple[tuple[After | None, Recomputation], ...] = field(init=False, repr=False, compare=False)
    has_leaving: bool = field(init=False, repr=False, compare=False)
    checks_versions: bool = field(init=False, repr=False, compare=False)
    innermost: tuple[Recomputation, ...] = field(init=False, repr=False, compare=False)
    finishes: tuple[tuple[int, After], ...] = field(init=False, repr=False, compare=False)
    asked: tuple[tuple[int, After], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # What is called for every region, found once.
        befores = tuple(guard.before for guard in self.guards)
        afters = tuple(None if type(guard).after is Guard.after else guard.after for guard in self.guards)
        object.__setattr__(self, "befores", befores)
        object.__setattr__(self, "afters", tuple(zip(afters, (guard.recompute for guard in self.guards))))
        object.__setattr__(self, "checks_versions", not any(guard.replaces_tensors for guard in self.guards))
        finishes = tuple(
            (index, guard.finish) for index, guard in enumerate(self.guards) if type(guard).finish is not Guard.finish
        )
        object.__setattr__(self, "finishes", finishes)
        asked = tuple(
            (index, guard.unrestored)
            for index, guard in enumerate(self.guards)
            if type(guard).unrestored is not Guard.unrestored
        )
        object.__setattr__(self, "asked", asked)
        innermost = tuple(guard.recompute for guard in self.guards if guard.is_innermost)
        object.__setattr__(self, "innermost", innermost)
        object.__setattr__(self, "has_leaving", any(type(guard).leave is not Guard.leave for guard in self.guards))

    def of(self, name: str | None, choice: Choice | None, in_graph: Any, inputs: Storage | None = None) -> Options:
        """Return these options for a region of that name, with what a policy says of its inside and of its inputs."""
        return replace(self, name=name, choice=choice, in_graph=in_graph, inputs=inputs or self.inputs)

    def exception(self, error: ReactivateError) -> BaseException:
        """Return the error to raise for `error`: a drop-in makes it the peer's own type as well (Rule 18)."""
        return error


class Slot:
    """A slot: what autograd holds in the place of a tensor that it saved. A recomputation fills it."""

    __slots__ = ("__weakref__", "value", "version")
    value: Tensor | None
    version: int  # of the value, when it was put in
    # Where no frame tells that a custom function saves, its node tells that it reads: it may do so several times.
    is_read_again: Any = False if FUNCTION_APPLY_CODE is not None else property(lambda slot: is_function_running())


class SharedSlot(Slot):
    """A slot that is read several times in one backward."""

    __slots__ = ()
    is_read_again = True


Metadata = tuple[torch.Size, torch.dtype, torch.device, int]  # the last is the version
metadata_of: Callable[[Tensor], Metadata] = attrgetter("shape", "dtype", "device", "_version")
Saved = tuple["weakref.ref[Slot]", Metadata, CodeType, int]


class Record:
    """One call: how to make it again, and what it saved.

    Attributes:
        early_stop: as in the options, unless one of the ops must not be cut short.
        fn: the function.
        args, kwargs: the specs of its arguments (see `inputs`).
        saved: for each tensor that autograd saved, in order, its slot, its metadata, and the code and the instruction
            that saved it.
        tokens: what the guards said before the forward pass; None once it is over.
        snapshots: for the guards that keep anything, how they recompute and what they keep.
        notes: what mutable objects held, in the order in which they are rewound.
        inputs: tensors that the recomputation reads where they are.
        states: tensors of which there are copies, None if there are none.
        saved_inputs: the specs of arguments and closed-over tensors that are saved tensors of autograd's own.
        replaced: {id of a spec: the spec to take in its place}, of arguments that the forward wrote to.
        asked: functions of guards that say what they do not restore, with what these guards noted.
        gradients: those of the arguments, None if none is a leaf.
        proof: of a forward that wrote to what there is no copy of; otherwise None.
        check: checksums of the forward, if the next recomputation is to be compared with it.
        context: the context variables of the forward pass.
        region_call: the identity of the call, for code inside of it.
        users_hooks: (pack, unpack), saved-tensor hooks of the user's around the region; None without any.
        log: the ops of the forward pass, with `determinism="values"`.
        sites: the calls that are saved, in order.
        fence: (device type, its fence) where the device's compiler would undo a recomputation, otherwise None; with a fence
            `entries`, the forms of all tensors among the arguments, and `named`, what else is read behind it, with versions.
    """

    __slots__ = (
        *(
            "__weakref__",
            "args",
            "asked",
            "check",
            "context",
            "early_stop",
            "entries",
            "fence",
            "fn",
            "gradients",
            "inputs",
        ),
        *(
            "kwargs",
            "lock",
            "log",
            "named",
            "notes",
            "options",
            "proof",
            "replaced",
            "saved",
            "saved_inputs",
            "sites",
        ),
        *("region_call", "snapshots", "states", "tokens", "users_hooks"),
    )
    options: Options
    early_stop: bool
    fn: Any
    args: list[Any]
    kwargs: dict[str, Any]
    saved: list[Saved]
    tokens: list[Any] | None
    users_hooks: tuple[Any, Any] | None
    region_call: RegionCall
    snapshots: list[tuple[Recomputation, Any]]
    notes: Sequence[Note]
    inputs: Sequence[Input]
    states: TensorStates | None
    saved_inputs: Sequence[Any]
    replaced: dict[int, Any]
    asked: Sequence[tuple[Callable[[Any], Any], Any]]
    gradients: Gradients | None
    proof: Any
    check: Any
    context: Context
    lock: RLock
    log: OpLog | None
    sites: Sequence[Any]
    fence: tuple[str, Fence] | None
    entries: Sequence[Any]
    named: Sequence[tuple[Tensor, int]]

    def take_snapshots(self) -> list[tuple[Recomputation, Any]]:
        """Return what the guards would keep if the forward pass ended now."""
        assert self.tokens is not None
        snapshots = []
        for token, (after, recomputation) in zip(self.tokens, self.options.afters):
            if token is not None:
                snapshot = token if after is None else after(token)
                if snapshot is not None:
                    snapshots.append((recomputation, snapshot))
        return snapshots

    def unrestored(self) -> list[Unrestored]:
        """Return what was modified since the forward began, and of what there is no copy."""
        found: list[Unrestored] = []
        for item in self.inputs:
            if item.tensor._version != item.version:
                found.append(Unrestored(item.tensor, item.place, item.version))
        if self.gradients is not None:
            if self.tokens is not None:
                self.gradients.look()
            for gradient, version in self.gradients.unknown:
                found.append(Unrestored(gradient, "the gradient of an argument", version))
        for unrestored, token in self.asked:
            found += unrestored(token)
        return found

    def forget(self) -> None:
        """Let go of recomputed tensors that nobody asked for."""
        for entry in self.saved:
            slot = entry[0]()
            if slot is not None:
                slot.value = None


class Observer(Protocol):
    """Somebody who watches what regions do."""

    def forward_done(self, record: Record) -> None:
        """A region's forward pass is over."""

    def recomputation_done(self, record: Record) -> None:
        """A region was recomputed."""


_observer: ContextVar[Observer | None] = ContextVar("reactivate.observer", default=None)
observers: list[Observer] = []  # that are at work in any context: mostly none, and then nobody need look further


@contextmanager
def observed_by(observer: Observer) -> Iterator[None]:
    """Tell `observer` of the regions that begin inside of the context."""
    observers.append(observer)
    token = _observer.set(observer)
    try:
        yield
    finally:
        _observer.reset(token)
        observers.remove(observer)


_without_regions: ContextVar[bool] = ContextVar("reactivate.without_regions", default=False)
plain_contexts: list[object] = []  # that are open anywhere: mostly none, and then nobody need look further


@contextmanager
def without_regions() -> Iterator[None]:
    """Checkpointed functions are plain ones inside of the context."""
    mark = object()
    plain_contexts.append(mark)
    token = _without_regions.set(True)
    try:
        yield
    finally:
        _without_regions.reset(token)
        plain_contexts.remove(mark)


def are_regions_off() -> bool:
    """Return whether `without_regions` is around the call."""
    return _without_regions.get()


def tell(context: Context, event: str, record: Any) -> None:
    """Tell the observer of the context in which the region began, if it has a method for the event.

    Beside those of every `Observer`: `call_begins(site)`, `recomputation_begins(record)`.
    """
    observer = context.get(_observer)
    notice = getattr(observer, event, None)
    if notice is not None:
        notice(record)

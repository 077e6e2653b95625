"""Calls inside of a region that are saved: a replay skips them.

In the forward pass a saved call runs under hooks of its own. What it saves for its backward is either had again from
its arguments (see `derive`), which a replay makes anyway, or kept. Its results are kept as well, if a replay has to go
on after it. In a replay the call is not made: slots are filled from the arguments, and its results are handed back.

A call that cannot be skipped runs again in every replay, as if it were not saved: one that writes into its arguments,
whose result is written to afterwards or is a view of an argument, or that a backward inside of the region reads.
`reason` says which; so does `reactivate.explain`.

Calls are matched by number: of all calls that a policy has a say in, which one it was.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from operator import attrgetter, length_hint
from sys import _getframe
from types import CodeType, FrameType, FunctionType
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from reactivate._compat import (
    SavedTensor,
    flatten,
    give_back,
    is_function_mode_active,
    pop_function_mode,
    pop_saved_tensor_hooks,
    push_function_mode,
    push_saved_tensor_hooks,
    save_tensor,
    unflatten,
    without_function_modes,
)
from reactivate._engine.choice import Choice, Decision
from reactivate._engine.derive import Recipe, Sources
from reactivate._engine.record import FunctionSlot, Metadata, Saved, observers, tell
from reactivate._engine.sites import user_frame
from reactivate._types import DEVICE, Save, Storage

_VERSION = attrgetter("_version")


class SiteSlot(FunctionSlot):
    """A slot of a saved call: its tensor is kept, or made from an argument."""

    __slots__ = ("kept", "recipe")
    recipe: Recipe | None
    kept: Any  # a `Kept`, or None


class Kept:
    """A tensor that is kept for the backward."""

    __slots__ = ("handle", "storage", "tensor", "version")

    def __init__(self, tensor: Tensor, storage: Storage) -> None:
        self.tensor: Tensor | None = tensor
        self.version = tensor._version
        self.storage = storage
        self.handle: Any = None

    def settle(self) -> None:
        """Hand it to its storage, and to autograd, so that hooks around the region see it (Rule 9)."""
        tensor, self.tensor = self.tensor, None
        if tensor is not None and tensor._version == self.version:  # otherwise there is nothing that may be read
            handle = tensor if self.storage is DEVICE else self.storage.save(tensor)
            self.handle = save_tensor(handle, False) if isinstance(handle, Tensor) else handle

    def load(self) -> Tensor:
        """The tensor.

        Raises:
            RuntimeError: autograd's own, where it was written to since.
        """
        if self.handle is None:
            raise RuntimeError("what a saved call keeps has been modified by an inplace operation")
        handle = self.handle.unpack() if type(self.handle) is SavedTensor else self.handle
        return handle if self.storage is DEVICE else self.storage.load(handle)


class There(Kept):
    """A parameter, or a view of one: it is there anyway, and no hook need see it."""

    __slots__ = ()

    def settle(self) -> None:
        if self.tensor is not None:
            self.handle, self.tensor = self.tensor, None

    def load(self) -> Tensor:
        found: Tensor = self.handle
        if found._version != self.version:
            raise RuntimeError("a parameter that a saved call keeps has been modified by an inplace operation")
        return found


# A region around this one has to have what is kept more than once: for a replay, and for the backward.
KEPT_CODE = Kept.settle.__code__


class SavedSite:
    """One saved call.

    Attributes:
        number: which of the calls that the policy has a say in.
        label: what was called, for messages and to see that the replay calls the same.
        start, stop: which entries of the record's `saved` are its.
        count: how many tensors are among its arguments.
        outputs: what it returned, in order: a `Kept`, the number of an argument, or another value. None: not kept.
        changes: what brings guarded state to where the call left it.
        reason: why it runs again in replays, None if it does not.
        place: the code and the instruction that made the call.
    """

    __slots__ = (
        *(
            "changes",
            "count",
            "is_function",
            "label",
            "number",
            "outputs",
            "path",
            "place",
            "reason",
            "requires",
            "results",
        ),
        *("start", "stop", "structure"),
    )
    number: int
    label: str
    is_function: bool  # a custom `autograd.Function`
    path: str | None
    start: int
    stop: int
    count: int
    outputs: list[Any] | None
    requires: list[bool]
    structure: Any
    results: list[tuple[Tensor, int]]
    changes: list[Callable[[], Any]]
    reason: str | None
    place: tuple[CodeType, int]


_BACKWARD_INSIDE = "a backward inside of the region goes through it"

# The log that calls on this thread go to. A region without a policy inside of one with a policy is no affair of its.
_current: ContextVar[Log | None] = ContextVar("reactivate.sites", default=None)
open_logs: list[object] = []  # that are at work anywhere: mostly none, and then nobody need look further


def current_log() -> Log | None:
    """Where saved calls are noted or skipped: None outside of regions with a policy, and inside of a saved call."""
    log = _current.get() if open_logs else None
    return None if log is None or log.is_inside else log


def is_at_work() -> bool:
    """Whether calls on this thread go to a log."""
    return _current.get() is not None


@contextmanager
def set_aside() -> Iterator[None]:
    """No log is at work on this thread for the time of the context."""
    token = _current.set(None)
    try:
        yield
    finally:
        _current.reset(token)


def forget_log() -> None:
    """For the replay of a region without a policy: what its context carries is the log of a forward pass around it."""
    if open_logs:
        _current.set(None)


class Log:
    """What a forward pass and a replay have in common: they number calls."""

    def __init__(self, record: Any, choice: Choice) -> None:
        self._record = ref(record)  # which has the log, as have the contexts of regions inside of it
        self.choice = choice
        self.number = 0
        self.is_inside = False
        self._mode: _Mode | None = _Mode(self, choice) if choice.sees_functions else None

    @property
    def record(self) -> Any:
        """The region's record."""
        return self._record()

    def open(self) -> None:
        """From here on, calls on this thread go to this log."""
        open_logs.append(self)
        self._token = _current.set(self)
        if self._mode is not None:
            push_function_mode(self._mode)

    def close(self) -> None:
        """The end of what `open` began."""
        if self._mode is not None:
            pop_function_mode()
            self._mode = None  # which knows the log: a cycle would hold the region until the collector runs (Rule 2)
        _current.reset(self._token)
        open_logs.remove(self)

    def call(self, decision: Decision, fn: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """`fn(*args, **kwargs)`, a call that the policy has a say in."""
        raise NotImplementedError

    def run_again(self, fn: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """A call that is not skipped, and nothing inside of it is looked at."""
        self.is_inside = True
        try:
            return fn(*args, **kwargs)
        finally:
            self.is_inside = False


class _Mode(TorchFunctionMode):
    """Shows torch's functions to a log."""

    def __init__(self, log: Log, choice: Choice) -> None:
        self._log = log
        self._choice = choice
        self._decisions = choice.decisions
        self._ignored = choice.ignored

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self._ignored:
            return func(*args, **kwargs) if kwargs else func(*args)
        decision = self._decisions.get(func)
        if decision is None:
            decision = self._choice.look_at(func)
        if decision.is_opened and current_log() is self._log:
            with self:
                return opened(func)(*args, **(kwargs or {}))
        if not decision.is_of_interest or current_log() is not self._log:
            return func(*args, **kwargs) if kwargs else func(*args)
        return self._log.call(decision, func, args, kwargs or {})


class Call:
    """A saved call while it runs."""

    __slots__ = ("changes", "decision", "entries", "saved", "site", "sources", "storage", "versions")

    def __init__(
        self, log: Log, decision: Decision, number: int, storage: Storage, args: Any, kwargs: dict[str, Any]
    ) -> None:
        self.decision = decision
        self.storage = storage
        self.changes: list[Callable[[], Any]] = []
        self.entries = log.record.saved
        self.saved: list[tuple[SiteSlot, Tensor]] = []
        self.sources = Sources(tensors_in(args, kwargs))
        self.versions = list(map(_VERSION, self.sources.arguments))
        site = self.site = SavedSite()
        site.number, site.label, site.path, site.is_function = number, decision.label, decision.path, False
        site.start = len(self.entries)
        site.count = len(self.sources.arguments)
        frame = user_frame(_getframe(3))
        site.place = (frame.f_code, frame.f_lasti)

    def pack(self, tensor: Tensor) -> SiteSlot:
        """Autograd saves `tensor` for the backward of the call."""
        if is_function_mode_active():
            with without_function_modes():
                return self.pack(tensor)
        slot = SiteSlot()
        slot.value = slot.kept = slot.recipe = None
        self.saved.append((slot, tensor))
        metadata: Metadata = (tensor.shape, tensor.dtype, tensor.device, tensor._version)
        self.entries.append((ref(slot), metadata, *self.site.place))
        return slot


class Pending(NamedTuple):
    """A custom function whose forward has returned, and which has not saved yet.

    Attributes:
        result: what its forward returned.
        versions: of the tensors in it, by their ids.
        frame: that of `Function.apply`, under which it will save.
    """

    call: Call
    result: Any
    versions: dict[int, int]
    frame: FrameType | None


@functools.cache
def opened(function: FunctionType) -> FunctionType:
    """One of torch's functions that are written in Python, without its question whether a mode wants all of it.

    So that a mode sees the functions that it calls.
    """
    names = {**function.__globals__, "has_torch_function": lambda tensors: False}
    copied = FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied


class ForwardLog(Log):
    """The saved calls of a forward pass."""

    def __init__(self, record: Any, choice: Choice) -> None:
        super().__init__(record, choice)
        self.sites: list[SavedSite] = []
        self.counts: dict[Any, int] = {}
        self.pending: Pending | None = None
        self._must_rerun: str | None = None

    def call(self, decision: Decision, fn: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        call = self.begin(decision, args, kwargs)
        if call is None:
            return fn(*args, **kwargs)
        log = self.record.log
        return (self._save if log is None else log.unseen(self._save))(call, fn, args, kwargs)

    def begin(self, decision: Decision, args: Any, kwargs: dict[str, Any]) -> Call | None:
        """A call that the policy has a say in: None if it is not to be saved."""
        number = self.number
        self.number += 1
        action = decision.action or self.choice.ask(decision, self.counts)
        if type(action) is not Save:
            return None
        if self.pending is not None:
            self.finish_pending()
        call: Call = _unseen(Call, self, decision, number, action.storage, args, kwargs)
        if observers:
            tell(self.record.context, "call_begins", call.site)
        return call

    def _save(self, call: Call, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        push_saved_tensor_hooks(call.pack, self.record.unpack)
        try:
            result = self.run_again(fn, args, kwargs)
        except BaseException:
            call.saved.clear()
            raise
        finally:
            pop_saved_tensor_hooks()
        if not call.decision.is_quiet:
            call.changes = self.changes()
        self.finish(call, result, None)
        return result

    def finish_pending(self) -> None:
        """All has been saved that a custom function saves."""
        pending, self.pending = self.pending, None
        if pending is not None:
            self.finish(pending.call, pending.result, pending.versions)

    def finish(self, call: Call, result: Any, versions: dict[int, int] | None) -> None:
        """A saved call has returned: take down what is to be kept of it."""
        site = call.site
        site.stop = len(self.record.saved)
        site.changes = call.changes
        _unseen(self._take_down, call, result, versions)
        call.saved.clear()  # what was saved for the graph knows `call.pack`: a cycle, which no collector sees
        del call.sources
        if site.reason is not None:
            self._let_go(site)
        self.sites.append(site)

    def _watch(self, result: Any) -> None:
        """See to it that a backward inside of the region is noticed, also if it reads nothing that the call saved."""
        leaves = (leaf for leaf in flatten(result)[0] if isinstance(leaf, Tensor))
        for node in {leaf.grad_fn for leaf in leaves if leaf.grad_fn is not None}:
            node.register_prehook(functools.partial(_went_through, ref(self)))

    def _why_again(self, call: Call) -> str | None:
        if self._must_rerun is not None:
            return self._must_rerun
        if call.versions != list(map(_VERSION, call.sources.arguments)):
            return "it writes into its arguments"
        is_op = call.decision.module is None and call.decision.name is None
        if is_op and not call.site.results:
            return "it computes no tensor"  # but may set something, as `set_grad_enabled` does
        return None

    def changes(self) -> list[Callable[[], Any]]:
        """What brings guarded state to where it is now."""
        record = self.record
        with without_function_modes():
            pairs = zip(record.options.guards, record.tokens)
            changes = [guard.skip(record.capture, token) for guard, token in pairs]
        return [change for change in changes if change is not None]

    def _take_down(self, call: Call, result: Any, versions: dict[int, int] | None) -> None:
        """Sort what was saved and what came out into what is kept and what is made again."""
        site, sources, saved, storage = call.site, call.sources, call.saved, call.storage
        site.reason = None
        kept: dict[Any, Kept] = {}
        for slot, tensor in saved:
            slot.recipe = None if _is_parameter(tensor) else sources.recipe_for(tensor)
            if slot.recipe is None:
                slot.kept = _keep(tensor, storage, kept)
        leaves, site.structure = flatten(result)
        site.outputs, site.requires, site.results = [], [], []
        for leaf in leaves:
            site.requires.append(isinstance(leaf, Tensor) and leaf.requires_grad)
            if not isinstance(leaf, Tensor):
                site.outputs.append(leaf)
                continue
            index = sources.which(leaf)
            if index >= 0:
                site.outputs.append(_Argument(index))
            elif _may_alias(leaf) and sources.sharing_memory(leaf) >= 0:
                site.reason = "its result is a view of an argument"
            else:
                item = _keep(leaf, storage, kept)
                site.outputs.append(item)
                assert item.tensor is not None  # without the graph of the result, and with its version
                site.results.append((item.tensor, leaf._version if versions is None else versions[id(leaf)]))
        site.reason = site.reason or self._why_again(call)
        if site.reason is None:
            self._watch(result)

    def rerun_all(self, reason: str) -> None:
        """Let replays make every saved call again."""
        self.finish_pending()
        self._must_rerun = reason
        for site in self.sites:
            site.reason = site.reason or reason
            self._let_go(site)

    def _let_go(self, site: SavedSite) -> None:
        """Keep nothing of a call that is made again."""
        site.outputs, site.results, site.changes = None, [], []
        for reference, *_ in self.record.saved[site.start : site.stop]:
            slot: Any = reference()
            if slot is not None:
                slot.kept = slot.recipe = None

    def settle(self) -> None:
        """The forward pass is over: keep what is to be kept."""
        self.finish_pending()
        for site in self.sites:
            for result, version in site.results:
                if result._version != version:
                    site.reason = "its result is written to afterwards"
                    self._let_go(site)
                    break
        saved: Sequence[Saved] = self.record.saved
        last = last_needed(saved) if self.record.early_stop else len(saved)
        for site in self.sites:
            site.results = []
            if last < site.stop:
                site.outputs = None
            if site.outputs is not None:
                for item in site.outputs:
                    if isinstance(item, Kept):
                        item.settle()
            for index in range(site.start, site.stop):
                slot: Any = saved[index][0]()
                if slot is not None and slot.kept is not None:
                    slot.kept.settle()
        if self.choice.unmatched.parts:
            self.choice.unmatched.region_has_run(self.choice.path)


def _went_through(log: ref[ForwardLog], gradients: Any) -> None:
    found = log()
    if found is not None:
        found.rerun_all(_BACKWARD_INSIDE)


class ReplayLog(Log):
    """The saved calls of a replay: they are skipped."""

    def __init__(self, record: Any, choice: Choice, sites: Sequence[SavedSite], matching: Any) -> None:
        super().__init__(record, choice)
        self._todo = iter(sites)
        self._next = next(self._todo, None)
        self._matching = matching
        self._contexts = ExitStack()
        self.skipped: list[SavedSite] = []  # custom functions, until `apply` has been told of their results

    def close(self) -> None:
        super().close()
        self._contexts.close()

    def call(self, decision: Decision, fn: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        number, site = self.number, self._next
        self.number += 1
        if site is None or site.number != number or self._matching.is_complete:
            return fn(*args, **kwargs)
        if site.label != decision.label:
            raise self._matching.refuse_site(site, decision.label)
        self._next = next(self._todo, None)
        skip, log = self._skip, self._matching.log
        return (skip if log is None else log.unseen(skip))(site, fn, args, kwargs)  # as in the forward pass

    def _skip(self, site: SavedSite, fn: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        if site.reason is None:
            arguments = _unseen(self._fill, site, args, kwargs)
            loaded = None if site.outputs is None else self._load(site, site.outputs)
            if loaded is not None:
                return self._hand_back(site, loaded, arguments)
        return self.run_again(fn, args, kwargs)

    def _load(self, site: SavedSite, outputs: Iterable[Any]) -> list[Any] | None:
        """What the call returned; None if somebody has written to it since the region ended, so that it runs again."""
        try:
            return [item.load() if isinstance(item, Kept) else item for item in outputs]  # may replay a region around
        except RuntimeError as error:
            if "modified by an inplace operation" not in str(error):
                raise
        self._matching.go_back_to(site)
        return None

    def _hand_back(self, site: SavedSite, results: Iterable[Any], arguments: Sequence[Tensor]) -> Any:
        if site.is_function:
            self.skipped.append(site)
        if site.changes:
            _unseen(self._change, site)
        return _unseen(_results, site, results, arguments)

    def _fill(self, site: SavedSite, args: Any, kwargs: dict[str, Any]) -> list[Tensor]:
        arguments = tensors_in(args, kwargs)
        self._matching.skip(site, arguments)
        return arguments

    def _change(self, site: SavedSite) -> None:
        for change in site.changes:
            context = change()
            if context is not None:
                self._contexts.enter_context(context)


def _results(site: SavedSite, outputs: Iterable[Any], arguments: Sequence[Tensor]) -> Any:
    """What the call returned: tensors with a place in a graph where they had one, so that what follows saves."""
    leaves: list[Any] = []
    for item, requires in zip(outputs, site.requires):
        if isinstance(item, Tensor):
            tensor = item.detach()
            leaves.append(give_back(tensor) if requires and torch.is_grad_enabled() else tensor)
        else:
            leaves.append(arguments[item.number] if isinstance(item, _Argument) else item)
    return unflatten(leaves, site.structure)


def _unseen(function: Callable[..., Any], *args: Any) -> Any:
    """What is looked at here are not the user's calls: modes around the region do not see them."""
    if not is_function_mode_active():
        return function(*args)
    with without_function_modes():
        return function(*args)


class _Argument:
    """Says that a call returned one of its arguments."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number


def last_needed(saved: Sequence[Saved]) -> int:
    """The last entry that only a replay can fill, -1 if there is none."""
    for index in range(len(saved) - 1, -1, -1):
        slot = saved[index][0]()
        if slot is not None and getattr(slot, "kept", None) is None:
            return index
    return -1


def position(entries: Any, saved: Sequence[Saved]) -> int:
    """How many of `saved` the iterator `entries` over it has given."""
    return len(saved) - length_hint(entries)


def tensors_in(args: Any, kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors among the arguments of a call, also those in lists, tuples and dicts."""
    found: list[Tensor] = []
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += tensors_in(value, {})
        elif isinstance(value, dict):
            found += tensors_in(value.values(), {})
    return found


def _is_parameter(tensor: Tensor) -> bool:
    """Whether it is a parameter, or a view of one: then it is there anyway."""
    base = tensor._base
    if base is None:
        return tensor.requires_grad and tensor.is_leaf
    return base.requires_grad and base.is_leaf


def _may_alias(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided


def _keep(tensor: Tensor, storage: Storage, kept: dict[Any, Kept]) -> Kept:
    """`tensor` without its graph, which would otherwise hold itself; a parameter as it is: it is there anyway."""
    if _is_parameter(tensor):
        return There(tensor.detach(), DEVICE)
    key: Any = id(tensor)
    # A result that was saved is another object. On the device that costs nothing; another storage would keep it twice.
    if storage is not DEVICE and type(tensor) is Tensor and tensor.layout is torch.strided:
        memory = tensor.untyped_storage()._cdata
        key = (memory, tensor.storage_offset(), tensor.size(), tensor.stride(), tensor.dtype)
    if key not in kept:
        kept[key] = Kept(tensor.detach(), storage)
    return kept[key]

"""Effects of a saved call besides its result and its random numbers: a call that has any is run again.

A recomputation skips a saved call, and with it what the call did to a list, a cache, a buffer. So everything that the region
records, and everything that the call can reach, is compared before and after the call. This is the one place where saved
calls ask for state: `Effects(...)` when a call begins, `changed()` when it returns, and `streams()` for the random numbers.
"""

from __future__ import annotations

import functools
import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextvars import copy_context
from enum import Enum
from itertools import chain
from operator import attrgetter, is_
from types import BuiltinFunctionType, CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, is_grad_enabled
from torch.nn import Module

from reactivate._passes.current import go_on_at, running_now
from reactivate._saved_calls.choice import CallDecision
from reactivate._saved_calls.results import attributes_of, is_plain
from reactivate._snapshot.facts import facts_of
from reactivate._snapshot.group_copy import GroupCopy
from reactivate._snapshot.held import ATOMS, WeakTensor
from reactivate._snapshot.holders import CellContainerHolder, Contents, Holder
from reactivate._snapshot.iterators import holds_iterator, is_iterator, position_of
from reactivate._snapshot.kinds import is_value, package_of
from reactivate._snapshot.moment import Moment
from reactivate._snapshot.parts import Parts
from reactivate._snapshot.reached_modules import ReachedModules
from reactivate._snapshot.small_copy import SmallCopy
from reactivate._snapshot.tensor_states import TensorStates, versions_of as versions_of_state
from reactivate._snapshot.unseen_writes import names_a_way
from reactivate._torch.modes import FakeTensor, run_unseen
from reactivate._torch.ops import Work, arrived
from reactivate._xla.fence import fences

LIMIT = 1_000  # of items: a call that is given more is not worth the look
_VERSION, _REQUIRES_GRAD, _TARGET = map(attrgetter, ("_version", "requires_grad", "target"))
_WRITES = "it writes to a tensor that the region reads"
_TOO_MUCH = f"more than {LIMIT} objects, too many to see whether it changes one"
_SIZED = (tuple, list, set, frozenset, deque, dict)


class Effects:
    """Everything that a call can change, as it is when the call begins.

    Args:
        region: the region, whose forward is running.
        decision: what is called: torch's own ops write to their arguments only, and other ops run no code of the user's.
        fn, args, kwargs: the call.
        arguments: the tensors among the arguments.

    Attributes:
        is_overwritten: whether a collective in place has written to a tensor that the call can reach.
        written_on_device: returns whether the call wrote to state on a device without a new version; None if there is none.
    """

    __slots__ = (
        *("__weakref__", "_checks", "_guards", "_is_torchs", "_objects", "_place", "_region", "_settings", "_versions"),
        *("is_overwritten", "tensors", "written_on_device"),
    )

    def __init__(
        self, region: Any, decision: CallDecision, fn: Any, args: Any, kwargs: Any, arguments: list[Tensor]
    ) -> None:
        self.is_overwritten = False
        self.written_on_device: Callable[[], bool] | None = None
        self.tensors = arguments
        self._region, self._place, self._is_torchs = region, running_now(), decision.is_torchs
        self._checks: list[Check] = []
        if decision.is_users:
            self._objects = _Objects(fn, (args, kwargs))
            self.tensors = [*arguments, *self._objects.tensors]
            self._checks.append(self._objects.changed)
        self._versions = versions_of(self.tensors)
        if not decision.is_torchs:
            self._look_at_region(region)
            if region.call.may_write_unseen() or (type(fn) is FunctionType and names_a_way(facts_of(fn))):
                self._checks.append(_of_bytes(self.tensors))
        if decision.name is None and decision.op is not None and decision.op.endswith(("batch_norm", "instance_norm")):
            self._checks += _moving_statistics(args, kwargs)

    def _look_at_region(self, region: Any) -> None:
        """Take down all that the region records."""
        self._settings = copy_context(), is_grad_enabled()
        self._guards = [(guard, guard.before(region.call)) for guard in region.options.compared]
        read = [*region.call.given, *(item.tensor for item in region.inputs)]
        self._checks += [_of_moment(region.moment), _of_versions(read)]
        if region.reached is not None:
            self._checks.append(_of_reached(region.reached))

    def changed(self) -> str | None:
        """Return what the call did, in words; None if nothing."""
        if self.is_overwritten or self._versions is None or self._versions != versions_of(self.tensors):
            return "it writes into its arguments or into what it closes over"
        late: list[Tensor] = []
        found = _first(self._checks, late)
        if found is None and not self._is_torchs:
            found = self._changed_settings(self._region)
        if late:
            self.written_on_device = _answer(late)
        return found

    def streams(self) -> list[Callable[[], Any]]:
        """Return what brings random streams, and the place in the region, to where they are now."""
        found = [guard.position(self._region.call) for guard in self._region.options.random]
        place = running_now()
        if place is not None and place is not self._place:  # there are regions inside of the call
            found.append(functools.partial(go_on_at, place))
        return [bring for bring in found if bring is not None]

    def _changed_settings(self, region: Any) -> str | None:
        before, had_grad = self._settings
        if is_grad_enabled() is not had_grad:
            return "it turns gradients on or off"
        for variable, value in copy_context().items():
            if before.get(variable, before) is not value and not variable.name.startswith("reactivate."):
                return "it sets a context variable"
        for guard, state in self._guards:
            if not _is_equal(guard.before(region.call), state):
                return f"it changes state of the guard {guard.name!r}"
        return None


def versions_of(tensors: list[Tensor]) -> list[int] | None:
    """Their version counters, None if one has none: writes into a tensor made in inference mode are not counted.

    Those of tensors that a collective is filling are read when it is done, so that every rank reads the same.
    """
    try:
        return list(map(_VERSION, arrived(tensors)))
    except RuntimeError:
        return None


def was_there(region: Any, value: Any) -> bool | None:
    """Return True for an object or tensor that the region records, False for one that these hold by now, None for others."""
    moments = [region.moment, *(() if region.reached is None else region.reached.moments)]
    of_modules = [moment.parts for moment in moments if moment.parts is not None]
    holders = [holder for moment in moments for holder in moment.holders]
    is_it = functools.partial(is_, value)
    recorded = (
        *(item.attributes for item in of_modules),
        *(item.entries for item in of_modules),
        map(_TARGET, holders),
    )
    if any(map(is_it, chain.from_iterable(recorded))):
        return True
    present = (space.values() for item in of_modules for space in item.namespaces)
    held = (holder.get() for holder in holders)
    return False if any(map(is_it, chain.from_iterable(chain(present, held)))) else None


# -- what a region records ----------------------------------------------------------------------------------------------

# Each function looks at some state when a call begins, and returns the check for when it returns.
Check = Callable[["list[Tensor]"], "str | None"]
"""Returns what the call did, in words. Flags that a device still computes go into the list."""


def _moving_statistics(args: Any, kwargs: Any) -> list[Check]:
    """Check a call of an op that moves running statistics without a new version."""
    flags = args[5:6] or (kwargs.get("training", kwargs.get("use_input_stats")),)
    given = (*args[1:5], *kwargs.values())
    moves = flags[0] is not False and any(isinstance(item, Tensor) and not item.requires_grad for item in given)
    return [lambda late: "it moves running statistics"] if moves else []


def _of_versions(tensors: Iterable[Any]) -> Check:
    found = [item for item in tensors if type(item) is WeakTensor or not item.is_inference()]
    before = list(map(_VERSION, found))
    return lambda late: _WRITES if before != list(map(_VERSION, found)) else None


def _of_objects(holders: Sequence[Holder], held: Sequence[Contents], is_reached: bool) -> Check:
    """Check objects that the region records. Most hold what they held when the region began."""
    pairs = () if is_reached else enumerate(zip(holders, held))
    others = {index: _present(holder) for index, (holder, contents) in pairs if not holder.is_at(contents)}

    def check(late: list[Tensor]) -> str | None:
        for index, holder in enumerate(holders):
            contents, iterators = others.get(index, (held[index], ()))
            if not holder.is_at(contents) or _have_advanced(iterators):
                kind = type(holder.target)
                if isinstance(holder, CellContainerHolder) and contents[0] is not None:
                    kind = contents[0]
                return f"it changes {f'`{holder.name}`' if holder.name else f'a {kind.__name__}'}"
        return None

    return check


def _present(holder: Holder) -> tuple[Contents, Positions]:
    contents = holder.get()
    return contents, _positions(filter(holds_iterator, contents))


Positions = Sequence["tuple[Any, Any]"]


def _positions(iterators: Iterable[Any]) -> Positions:
    return [(item, position_of(item)) for item in iterators]


def _have_advanced(positions: Positions) -> bool:
    return any(position_of(item) != position for item, position in positions)


def _of_states(states: TensorStates, words: str, is_reached: bool = False) -> Check:
    """Check tensors of which the region has copies: their versions, and the bytes of those that may have no new one.

    Args:
        states: the tensors.
        words: for a write to one.
        is_reached: whether they were recorded during the call, so that they began as they are recorded.
    """
    small, versions = states.small, states.versions
    groups = [group for group in states.groups if _can_be_compared(group.tensors[0])]
    if not is_reached:
        small, versions = small and SmallCopy(small.tensors, small.places), versions_of_state(states.tensors)
        groups = [run_unseen(GroupCopy, group.tensors) for group in groups]

    def check(late: list[Tensor]) -> str | None:
        if versions_of_state(states.tensors) != versions:
            return words
        is_same = small is None or SmallCopy(small.tensors, small.places).are(small)
        return _changed_bytes(groups, late) if is_same else words

    return check


def _of_bytes(tensors: Iterable[Tensor]) -> Check:
    """Check tensors that may be written to without a new version: through `.data`, NumPy or a kernel."""
    own = {id(tensor): tensor for tensor in tensors if _can_be_compared(tensor)}.values()
    return functools.partial(_changed_bytes, [run_unseen(GroupCopy, [tensor]) for tensor in own])


def _can_be_compared(tensor: Tensor) -> bool:
    """Return whether bytes of a tensor can be compared: on a lazy device and among fake tensors, versions have to do."""
    return not isinstance(tensor, FakeTensor) and tensor.device.type not in (fences() or ())


def _changed_bytes(groups: Sequence[GroupCopy], late: list[Tensor]) -> str | None:
    for before in groups:
        now: GroupCopy = run_unseen(GroupCopy, before.tensors)
        if not before.tensors[0].is_cpu:
            late += [run_unseen(_is_written, *pair) for pair in zip(now.contents, before.contents)]
        elif not now.are(before):
            return "it writes to a tensor without a new version, as through `.data` or NumPy"
    return None


def _is_written(now: Tensor, before: Tensor) -> Tensor:
    return torch.ne(now, before).any() if now.shape == before.shape else now.new_ones((), dtype=torch.bool)


def _answer(flags: list[Tensor]) -> Callable[[], bool]:
    """Return a function that says whether a flag on a device is set, for a recomputation: to ask now would be to wait."""
    flag = run_unseen(torch.stack, flags).any().to("cpu", non_blocking=True)
    event = torch.Event(flags[0].device)
    event.record()

    def answer() -> bool:
        event.synchronize()
        return bool(flag)

    return answer


def _of_moment(moment: Moment, is_reached: bool = False) -> Check:
    """Check all that a moment holds: objects, tensors, modules with their attributes, registries, hooks and buffers."""
    inner = [_of_objects(moment.holders, moment.contents, is_reached)] if moment.holders else []
    if moment.states.tensors:
        words = _WRITES if moment.parts is None else "it writes to a buffer of a module"
        inner.append(_of_states(moment.states, words, is_reached))
    flags = (list(moment.kinds), list(moment.differentiable)) if is_reached else _flags_of(moment)
    own = moment.protocols
    protocols = own if is_reached else [(module, module.recompute_state()) for module, _ in own]
    parts, hooks, iterators = moment.parts, moment.hook_copies, _positions(())
    if not (is_reached or parts is None or parts.are_current()):
        parts = Parts(parts.namespaces)
        iterators = _positions(filter(holds_iterator, parts.attributes))
    if not (is_reached or moment.are_hooks_current(hooks)):
        hooks = [(*item, *item.values()) for item in moment.hooks]

    def check(late: list[Tensor]) -> str | None:
        if (parts is not None and not parts.are_current()) or _have_advanced(iterators):
            return "it sets attributes of a module"
        if not moment.are_hooks_current(hooks) or _flags_of(moment) != flags:
            return "it changes hooks, a class or `requires_grad` in a module"
        if any(not _is_equal(module.recompute_state(), state) for module, state in protocols):
            return "it changes the `recompute_state()` of a module"
        return _first(inner, late)

    return check


def _flags_of(moment: Moment) -> tuple[list[type], list[bool]]:
    return list(map(type, moment.modules)), list(map(_REQUIRES_GRAD, moment.parameters))


def _of_reached(reached: ReachedModules) -> Check:
    """Check modules that are recorded as they are reached, perhaps during the call."""
    checks = list(map(_of_moment, reached.moments))

    def check(late: list[Tensor]) -> str | None:
        new = (_of_moment(moment, is_reached=True) for moment in reached.moments[len(checks) :])
        return _first([*checks, *new], late)

    return check


def _first(checks: Iterable[Check], late: list[Tensor]) -> str | None:
    return next(filter(None, (check(late) for check in checks)), None)


def _is_equal(one: Any, other: Any) -> bool:
    """Return whether two states of a guard are known to be the same."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return one.shape == other.shape and one.dtype == other.dtype and bool(run_unseen(torch.equal, one, other))
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_is_equal, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_is_equal(value, other[key]) for key, value in one.items())
    try:
        return bool(one == other)
    except Exception:  # of whatever class a guard's state is
        return False


# -- what a call can reach ----------------------------------------------------------------------------------------------


class _Objects:
    """The objects that a call can reach through its arguments and closures, without modules and generators.

    Attributes:
        tensors: all of them, each once.
    """

    def __init__(self, fn: Any, given: Any) -> None:
        self.tensors: list[Tensor] = []
        self._contents: list[tuple[Any, list[Any], str]] = []
        self._iterators: list[tuple[Any, Any]] = []
        self._problem: str | None = None
        self._seen: set[int] = set()
        for value, way in ((given, "is given"), (fn, "closes over")):
            self._count = 0
            self._visit(value, way)
        self._memory = list(map(_memory_of, self.tensors))

    def changed(self, late: list[Tensor]) -> str | None:
        """Return what changed, or may have, in words."""
        if self._problem is not None:
            return self._problem
        if self._memory != list(map(_memory_of, self.tensors)):
            return "it gives a tensor other memory (`.data = ...`)"
        if _have_advanced(self._iterators):
            return "it goes on with an iterator"
        for value, before, way in self._contents:
            items = _items(value)
            if items is None or len(items) != len(before) or not all(map(is_, items, before)):
                return f"it changes a {type(value).__name__} that it {way}"
        return None

    def _visit(self, value: Any, way: str) -> None:
        kind = type(value)
        if kind in ATOMS or self._count > LIMIT or id(value) in self._seen:
            return
        self._seen.add(id(value))
        if isinstance(value, Tensor):
            self.tensors.append(value)
        elif not _is_looked_after(value, kind):
            self._visit_items(value, kind, way)

    def _visit_items(self, value: Any, kind: type, way: str) -> None:
        if is_iterator(kind) and way == "closes over":
            self._iterators.append((value, position_of(value)))
        is_large = isinstance(value, _SIZED) and len(value) > LIMIT
        items = [] if is_large else _items(value)
        if items is None:
            is_torchs = package_of(kind) == "torch" and not isinstance(value, Work)  # which may wait
            if way == "is given" and not is_torchs:
                self._problem = f"it is given a {kind.__name__}, which it may change unseen"
            return
        self._count += LIMIT + 1 if is_large else len(items)
        if self._count > LIMIT:
            self._problem = f"it {way} {_TOO_MUCH}"
            return
        if kind is not tuple:
            self._contents.append((value, items, way))
        for item in items:
            self._visit(item, way)


def _memory_of(tensor: Tensor) -> Any:
    """Return the storage of a tensor, None if it has none of its own, as sparse ones."""
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return None


def _items(value: Any) -> list[Any] | None:
    """Return what is in a container, an object or a function; None if that cannot be seen."""
    kind: Any = type(value)
    if issubclass(kind, dict):
        return [*dict.keys(value), *dict.values(value), *attributes_of(value)]
    if issubclass(kind, _SIZED):
        return [*value, *attributes_of(value)]
    if kind is FunctionType:
        return [*(value.__closure__ or ()), *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
    if kind is CellType:
        try:
            return [value.cell_contents]
        except ValueError:  # nothing yet
            return []
    if kind is MethodType:
        return [value.__self__, value.__func__]
    if isinstance(value, functools.partial):
        return [value.func, value.args, value.keywords]
    return attributes_of(value) if is_plain(kind) else None


def _is_looked_after(value: Any, kind: type) -> bool:
    """Return whether a value cannot change, or a guard sees to it, or it is this package's own."""
    if isinstance(value, (Module, Enum, type, BuiltinFunctionType, torch.Generator, random.Random)):
        return True
    # Regions and their options know how often they ran.
    if is_value(kind) or package_of(kind) == "reactivate":
        return True
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, (numpy.generic, numpy.random.Generator, numpy.random.RandomState))

"""The calls of units, recorded: one forward pass in which each unit is a region that saves all of its calls.

So the engine itself says what it keeps of a call, which masks become bits, what is derived from arguments, and which calls
cannot be saved. The step ends where its backward begins.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, suppress
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode

from reactivate._model.apply import apply
from reactivate._modules.paths import is_below
from reactivate._passes.observing import observed_by
from reactivate._region.accounts import held_by, storages_of
from reactivate._region.region import Region
from reactivate._saved_calls.saved_call import Kept
from reactivate._torch.asking import asking
from reactivate._torch.autograd import SavedTensor, data_of
from reactivate._torch.dynamo import DispatchMode
from reactivate._torch.modules import without_reducing
from reactivate._torch.ops import flatten
from reactivate._types import Action, Recompute, Save, Site
from reactivate.planner.call_values import RecordedCall
from reactivate.planner.candidates import (
    Assignment,
    CallName,
    OfPlanner,
    is_torchs_leaf,
    join,
    name_of_function_call,
)
from reactivate.planner.trace.records import Costs
from reactivate.policies._base import Interest, ReadyMade

_BACKWARD = frozenset({Tensor.backward, torch.autograd.backward, torch.autograd.grad})
_OPENED = frozenset({"multi_head_attention_forward"})  # written in Python: the calls in it are looked at


class _ForwardDone(BaseException):
    """The backward would begin, and nothing is left to record: no `except Exception` takes it."""


def recorded_calls(
    model: Module,
    on_tensors: Callable[[], AbstractContextManager[tuple[Callable[[], None], Any]]],
    units: Mapping[str, Module],
    recorded: Mapping[str, Collection[str]],
    costs: Costs,
) -> dict[str, tuple[RecordedCall, ...]]:
    """Record the calls of some units; those of a unit that is called several times as its first call has them.

    Args:
        model: the model of the step.
        on_tensors: yields what runs the step.
        units: all units by their paths. Those that are not recorded are recomputed, so that memory is left.
        recorded: the units to record, with the functions that they call.
    """
    functions: frozenset[str] = frozenset().union(*recorded.values())
    policy = _SaveAll({path: units[path] for path in recorded}, units.keys(), functions)
    recorder = _Recorder(policy, recorded, costs)
    with ExitStack() as stack:
        for module in model.modules():
            if isinstance(module, DistributedDataParallel):  # which would wait for a backward that does not come
                stack.enter_context(without_reducing(module))
        stack.callback(apply(model, policy, early_stop=False).remove)
        run, _ = stack.enter_context(on_tensors())
        for path in recorded:
            hook = functools.partial(recorder.unit_done, path)
            stack.enter_context(units[path].register_forward_hook(hook, with_kwargs=True))
        stack.enter_context(observed_by(recorder))
        stack.enter_context(recorder)
        stack.enter_context(_UpToBackward(recorder.is_done))
        with suppress(_ForwardDone):
            run()
    return recorder.found


class _UpToBackward(TorchFunctionMode):
    """Ends a step where its backward would begin: an error out of the midst of one leaves memory with autograd's threads.

    A step whose backward torch does not tell of (`torch.autograd.backward`, before torch 2.13) runs to its end.
    """

    def __init__(self, is_done: Callable[[], bool]) -> None:
        self._is_done = is_done

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func = asking(func, kwargs)
        if func in _BACKWARD and self._is_done():
            raise _ForwardDone
        return func(*args, **(kwargs or {}))


class _SaveAll(OfPlanner):
    """Saves every call in some units, and knows which one it was asked about last."""

    def __init__(self, recorded: Mapping[str, Module], units: Collection[str], functions: frozenset[str]) -> None:
        self.leaves = {
            join(path, below): CallName(below)
            for path, unit in recorded.items()
            for below, module in unit.named_modules()
            if below and is_torchs_leaf(module)
        }
        self.asked: CallName | None = None
        self._recorded = recorded
        self._units = units
        self._functions = functions - _OPENED

    def __repr__(self) -> str:
        return "the calls of units, recorded"

    def __call__(self, site: Site) -> Action | None:
        if site.module is not None:
            if site.path in self._units:
                return Recompute()
            return Save() if site.path in self.leaves else None
        unit = next((path for path in self._recorded if is_below(site.path, path)), None)
        if unit is None:
            return None
        self.asked = name_of_function_call(site, unit)
        return Save()

    def _interest(self) -> Interest:
        return Interest(self._functions, modules=True, paths=True)

    def _inside(self, path: str) -> ReadyMade:
        return self if path in self._recorded else Assignment({})


class _Recorder(DispatchMode):
    """Observes regions, and adds up the time of ops by calls."""

    def __init__(self, policy: _SaveAll, recorded: Collection[str], costs: Costs) -> None:
        super().__init__()
        self.found: dict[str, tuple[RecordedCall, ...]] = {}
        self._policy = policy
        self._recorded = recorded
        self._costs = costs
        self._call: Any = None  # that was begun last
        self._names: dict[int, CallName] = {}  # by the ids of calls, which their region has
        self._seconds: dict[int, float] = {}
        self._calls: tuple[RecordedCall, ...] = ()  # of the region that was done last

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        call = self._call
        if call is not None and call.stop < 0:
            self._seconds[id(call)] += self._costs.of(func, args, kwargs or {}, result).seconds
        return result

    def is_done(self) -> bool:
        """Return whether all units have been recorded."""
        return self.found.keys() >= set(self._recorded)

    def call_begins(self, call: Any) -> None:
        """A call begins that is saved."""
        if call.path is not None:
            name = self._policy.leaves[call.path]
        else:
            assert self._policy.asked is not None
            name = self._policy.asked
        self._call, self._names[id(call)], self._seconds[id(call)] = call, name, 0.0

    def recomputation_done(self, region: Region) -> None:
        """A region was recomputed."""

    def forward_done(self, region: Region) -> None:
        """A region's forward pass is over: take down what it keeps of each call."""
        self._call = None
        if region.options.name in self._recorded:
            self._calls = tuple(self._calls_of(region))
            self._names.clear()
            self._seconds.clear()

    def unit_done(self, path: str, module: Module, args: Any, kwargs: Any, result: Any) -> None:
        """A unit has returned: what it was given and what it returns is there whatever is saved."""
        if path not in self.found:
            there = _memory_in((args, kwargs, result))
            self.found[path] = tuple(call.without(there) for call in self._calls)

    def _calls_of(self, region: Region) -> Iterator[RecordedCall]:
        calls, slots = region.saved_calls, region.slots or []
        for call, following in zip(calls, [*(call.start for call in calls[1:]), len(region.saved)]):
            own = [slots[number]() for number in range(call.start, call.stop)]
            is_needed = any(map(region.is_recomputed, range(call.stop, following)))
            yield RecordedCall(
                self._names[id(call)],
                self._seconds[id(call)],
                _memory_of(getattr(slot, "kept", None) for slot in own),
                _memory_of(call.kept()),
                any(getattr(slot, "derivation", None) is not None for slot in own) or is_needed,
                call.reason or "",
            )


def _memory_of(kept: Iterable[Any]) -> dict[int, int]:
    """Return the bytes behind tensors that are kept, by the address of each memory; parameters are there anyway."""
    found: dict[int, int] = {}
    for item in kept:
        if not isinstance(item, Kept) or item.is_there_anyway:
            continue
        handle = data_of(item.handle) if isinstance(item.handle, SavedTensor) else item.handle
        found |= _memory_in(list(held_by(handle)))
    return found


def _memory_in(values: Any) -> dict[int, int]:
    tensors = (leaf for leaf in flatten(values)[0] if isinstance(leaf, Tensor))
    return {
        StorageWeakRef(storage).cdata: int(storage.nbytes()) for tensor in tensors for storage in storages_of(tensor)
    }

"""A policy with an action of its own for each call of a module: of a layer that one forward of the model runs several times.

Calls are numbered from 0 in each forward of the model that the policy was applied to, from its outermost call on. A call
without gradients has no number, since there is nothing to recompute. Neither has a call outside of that forward, in another
thread, or in a graph of torch.compile: there, and after the last call that the policy knows, the module does what the policy
says of it without a number.

The numbers are in a context variable, in values that are never changed in place. A recomputation runs in the context in which
its forward began, so the calls inside of it have the numbers that they had. A number decides only what is recomputed, and
never about bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any

from torch import is_grad_enabled
from torch.compiler import is_compiling
from torch.nn import Module

from reactivate._engine.record import Options
from reactivate._model.applied import Applied
from reactivate._model.forwards import RegionForward
from reactivate._model.handle import AppliedForward, Owner, own_forward_of
from reactivate._types import Policy
from reactivate.policies._base import ReadyMade

Key = tuple[Owner, str]
Chosen = dict[int, AppliedForward]  # what one call does, by the ids of modules

_counts: ContextVar[Mapping[Owner, Mapping[str, int]]] = ContextVar("reactivate.counts", default=MappingProxyType({}))
_running: ContextVar[Mapping[Key, Chosen]] = ContextVar("reactivate.running_calls", default=MappingProxyType({}))


def applied_for(policy: Policy, options: Options) -> Applied:
    """Return a policy, ready to be put on a model.

    Args:
        policy: the same one for each call of the model.
        options: of its regions.
    """
    by_call = policy.by_call() if isinstance(policy, ReadyMade) else {}
    return AppliedByCall(policy, options, by_call) if by_call else Applied(policy, options)


class AppliedByCall(Applied):
    """A policy, on one model, that knows the calls of some modules one by one."""

    def __init__(self, policy: Policy, options: Options, by_call: Mapping[str, tuple[Policy, ...]]) -> None:
        super().__init__(policy, options)
        self._by_call = by_call
        self._chosen: dict[str, tuple[tuple[AppliedForward, ...], ...]] = {}

    def forwards_in(self, model: Module) -> list[AppliedForward]:
        self._chosen = {path: self._chosen_at(model, policies) for path, policies in self._by_call.items()}
        found = super().forwards_in(model)
        members = {
            id(forward.module()): (forward, path)
            for path, calls in self._chosen.items()
            for forwards in calls
            for forward in forwards
            if forward.path != path
        }
        found += [MemberForward(self, one.module(), one.path, one.hidden, path) for one, path in members.values()]
        own = next((forward for forward in found if forward.module() is model), own_forward_of(model))
        return [*found, ModelForward(self, model, "", own)]

    def _chosen_at(self, model: Module, policies: tuple[Policy, ...]) -> tuple[tuple[AppliedForward, ...], ...]:
        found: dict[Policy, tuple[AppliedForward, ...]] = {}
        for policy in dict.fromkeys(policies):
            one = Applied(policy, self.options)
            one.cache_watch = self.cache_watch  # one warning for all calls
            found[policy] = tuple(one.forwards_in(model))
        return tuple(found[policy] for policy in policies)

    def placed(self, kind: type[AppliedForward], module: Module, path: str, hidden: Any) -> AppliedForward:
        if kind is not RegionForward or path not in self._chosen:
            return super().placed(kind, module, path, hidden)
        return CountedForward(self, module, path, hidden, self._chosen[path])


class ModelForward(AppliedForward):
    """The model is called: from here to the end of the call its layers count theirs."""

    @property
    def stands_for(self) -> None:
        return None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_compiling():
            return self.in_graph(*args, **kwargs)
        counts = _counts.get()
        if self.applied in counts:  # the model calls itself
            return self.original()(*args, **kwargs)
        token = _counts.set({**counts, self.applied: {}})
        try:
            return self.original()(*args, **kwargs)
        finally:
            _counts.reset(token)


class CountedForward(RegionForward):
    """The module does what the policy says of the call; without a number, it is a region."""

    def __init__(
        self,
        applied: Owner,
        module: Module,
        path: str,
        hidden: Any = None,
        calls: tuple[tuple[AppliedForward, ...], ...] = (),
    ) -> None:
        super().__init__(applied, module, path, hidden)
        self._calls = calls
        self._chosen = [{id(forward.module()): forward for forward in forwards} for forwards in calls]

    @property
    def stands_for(self) -> type[RegionForward]:
        return RegionForward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_compiling():
            return super().__call__(*args, **kwargs)
        running, key = _running.get(), (self.applied, self.path)
        if not is_grad_enabled() or key in running:  # in a call of the module it calls itself
            return self.original()(*args, **kwargs)
        number = self._number()
        if number is None:
            return super().__call__(*args, **kwargs)
        chosen = self._chosen[number]
        token = _running.set({**running, key: chosen})
        try:
            return chosen.get(id(self.module()), self.original())(*args, **kwargs)
        finally:
            _running.reset(token)

    def _number(self) -> int | None:
        """Count this call; None if the policy does not know it."""
        counts = _counts.get()
        if self.applied not in counts:
            return None
        calls = counts[self.applied]
        number = calls.get(self.path, 0)
        _counts.set({**counts, self.applied: {**calls, self.path: number + 1}})
        return number if number < len(self._chosen) else None

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return type(self), (self.applied, self.module(), self.path, self.hidden, self._calls)


class MemberForward(AppliedForward):
    """The module, inside of one whose calls are counted, does what the policy says of the call that runs."""

    @property
    def stands_for(self) -> None:
        return None

    def __init__(self, applied: Owner, module: Module, path: str, hidden: Any = None, counted: str = "") -> None:
        super().__init__(applied, module, path, hidden)
        self._counted = counted

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_compiling():
            return self.in_graph(*args, **kwargs)
        chosen = _running.get().get((self.applied, self._counted), {})
        return chosen.get(id(self.module()), self.original())(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return type(self), (self.applied, self.module(), self.path, self.hidden, self._counted)

"""A policy on a model: which module gets what in the place of its `forward`, and what all of these share."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

from torch.nn import Module

from reactivate._compilers.graph import contexts_for
from reactivate._model.cache_watch import CacheWatch
from reactivate._model.forwards import (
    BudgetForward,
    FoundForward,
    HeadForward,
    RegionForward,
    SavedForward,
    SpansForward,
)
from reactivate._model.handle import FORWARD, AppliedForward, Handle, own_forward_of
from reactivate._model.selection import Selection
from reactivate._region.options import Options
from reactivate._saved_calls.choice import Choice
from reactivate._saved_calls.log import serve
from reactivate._types import DEVICE, Policy, Storage
from reactivate.policies._base import ReadyMade, interest_of
from reactivate.policies._unmatched import Unmatched


class Applied:
    """One policy on one model: what its regions share."""

    def __init__(self, policy: Policy, options: Options) -> None:
        self.policy = policy
        self.options = options
        self.handle = Handle(policy)
        self.unmatched = Unmatched(policy, "apply")
        self.cache_watch = CacheWatch()
        self.inputs: dict[str, Storage] = {}  # of the regions whose inputs go to a storage
        self.root: weakref.ref[Module] | None = None  # what it was applied to; None in a copy

    def attach(self, model: Module) -> None:
        """Take the place of the `forward` of the regions and the saved modules of `model`."""
        self.root = weakref.ref(model)
        for forward in self.forwards_in(model):
            forward.module().__dict__[FORWARD] = forward

    def forwards_in(self, model: Module) -> list[AppliedForward]:
        """Find the regions and the saved modules of `model`, and return what is to stand in for their `forward`."""
        chosen = Selection(model, self.policy, self.unmatched)
        self.inputs = chosen.inputs
        found: dict[int, AppliedForward] = {}
        for kind, path, module in kinds_in(chosen):
            hidden = found.get(id(module)) or own_forward_of(module)
            if kind is SpansForward:
                found[id(module)] = SpansForward(self, module, path, hidden, chosen.spans[path])
            elif kind is BudgetForward:
                found[id(module)] = BudgetForward(self, module, path, hidden, chosen.shares[path])
            else:
                found[id(module)] = kind(self, module, path, hidden)
        self.unmatched.regions = self.cache_watch.regions = len(self.handle.regions)
        self.handle.kept = chosen.kept_beside()
        if not found and isinstance(self.policy, ReadyMade) and self.policy._is_found:
            found[id(model)] = FoundForward(self, model, "", own_forward_of(model))
        return list(found.values())

    def options_of(self, path: str, within: str, module: weakref.ref[Module]) -> Options:
        policy = self.policy._inside(path) if isinstance(self.policy, ReadyMade) else self.policy
        interest = interest_of(policy)
        choice = in_graph = None
        if interest.any_function or interest.functions or interest.names or interest.modules:
            choice = serve(Choice(policy, self.unmatched, module, within, region=path))
            in_graph = contexts_for(policy, module, within)
        return self.options.of(path, choice, in_graph, self.inputs.get(path, DEVICE))

    def __deepcopy__(self, memo: dict[int, Any]) -> Applied:
        return Applied._copied(self.policy, self.options, self.handle.kept, self.inputs)

    def __reduce__(self) -> tuple[Callable[..., Applied], tuple[Any, ...]]:
        return Applied._copied, (self.policy, self.options, self.handle.kept, self.inputs)

    @classmethod
    def _copied(cls, policy: Policy, options: Options, kept: dict[str, str], inputs: dict[str, Storage]) -> Applied:
        applied = cls(policy, options)
        applied.handle.kept = dict(kept)
        applied.inputs = dict(inputs)
        applied.unmatched.parts = []  # that is the original's affair
        applied.cache_watch.is_done = True  # so is that
        return applied


def kinds_in(chosen: Selection) -> Iterator[tuple[type[AppliedForward], str, Module]]:
    """Yield the chosen modules, each with its path and the class of what is to stand in for its `forward`.

    A module may be there twice: the spans in it first, then the module around them.
    """
    yield from ((SpansForward, path, chosen.at(path)) for path in chosen.spans)
    kinds = (
        (RegionForward, chosen.regions),
        (SavedForward, chosen.saved),
        (HeadForward, chosen.heads),
        (BudgetForward, chosen.budgets),
    )
    for kind, modules in kinds:
        yield from ((kind, path, module) for path, module in modules.items())

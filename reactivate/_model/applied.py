"""A policy on a model: which module gets what in the place of its `forward`, and what all of these share."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from typing import Any, cast

from torch.nn import Module

from reactivate._compilers.graph import answers_in, contexts_for
from reactivate._model.cache_watch import CacheWatch
from reactivate._model.forwards import FoundForward
from reactivate._model.handle import AppliedForward, Handle
from reactivate._model.selection import Selection
from reactivate._modules.standin import own_forward_of
from reactivate._region.options import Options
from reactivate._saved_calls.choice import Choice
from reactivate._saved_calls.log import serve
from reactivate._types import DEVICE, Policy, Storage
from reactivate.policies._base import ReadyMade, interest_of
from reactivate.policies._unmatched import Unmatched


class Applied:
    """One policy on one model: what its regions share.

    Attributes:
        policy, options: the policy, and the options of its regions.
        handle: what undoes it.
        unmatched: the parts of the policy that have matched nothing so far.
        cache_watch: what measures the first calls of regions.
        inputs: {path: storage} of the regions whose inputs go to one.
        answers: {path: what tells a region from one of like modules}; see `answers_in`. Copies have those of the original,
            since they are made before the modules are.
        root: what it was applied to; None in a copy.
    """

    def __init__(self, policy: Policy, options: Options) -> None:
        self.policy = policy
        self.options = options
        self.handle = Handle(policy)
        self.unmatched = Unmatched(policy, "apply")
        self.cache_watch = CacheWatch()
        self.inputs: dict[str, Storage] = {}
        self.answers: dict[str, Hashable] = {}
        self.root: weakref.ref[Module] | None = None

    def attach(self, model: Module) -> None:
        """Take the place of the `forward` of the regions and the saved modules of `model`."""
        self.root = weakref.ref(model)
        for forward in self.forwards_in(model):
            forward.place()

    def forwards_in(self, model: Module) -> list[AppliedForward]:
        """Find the regions and the saved modules of `model`, and return what is to stand in for their `forward`."""
        chosen = Selection(model, self.policy, self.unmatched)
        self.inputs = chosen.inputs
        found: dict[int, AppliedForward] = {}
        for kind, path, module, more in chosen.forwards:
            found[id(module)] = kind(self, module, path, found.get(id(module)) or own_forward_of(module), *more)
        self.unmatched.regions = self.cache_watch.regions = len(self.handle.regions)
        self.handle.kept = chosen.kept_beside()
        if not found and isinstance(self.policy, ReadyMade) and self.policy._is_found:
            found[id(model)] = FoundForward(self, model, "", own_forward_of(model))
        return list(found.values())

    def options_of(self, path: str, within: str, module: weakref.ref[Module]) -> Options:
        """Return the options of a region.

        Args:
            path: of the region.
            within, module: the module that it is, or that it is a span of, and the path of that.
        """
        policy = self.policy._inside(path) if isinstance(self.policy, ReadyMade) else self.policy
        interest = interest_of(policy)
        choice = in_graph = None
        if interest.any_function or interest.functions or interest.names or interest.modules:
            choice = serve(Choice(policy, self.unmatched, module, within, region=path))
            if path not in self.answers:
                self.answers[path] = answers_in(policy, cast(Module, module()), within)
            in_graph = contexts_for(policy, module, within, self.answers[path])
        return self.options.of(path, choice, in_graph, self.inputs.get(path, DEVICE))

    def __deepcopy__(self, memo: dict[int, Any]) -> Applied:
        return Applied._copied(self.policy, self.options, self.handle.kept, self.inputs, self.answers)

    def __reduce__(self) -> tuple[Callable[..., Applied], tuple[Any, ...]]:
        return Applied._copied, (self.policy, self.options, self.handle.kept, self.inputs, self.answers)

    @classmethod
    def _copied(
        cls,
        policy: Policy,
        options: Options,
        kept: dict[str, str],
        inputs: dict[str, Storage],
        answers: dict[str, Hashable],
    ) -> Applied:
        applied = cls(policy, options)
        applied.handle.kept = dict(kept)
        applied.inputs, applied.answers = dict(inputs), dict(answers)
        applied.unmatched.parts = []  # that is the original's affair
        applied.cache_watch.is_done = True  # so is that
        return applied

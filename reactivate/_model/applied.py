"""A policy on a model: what stands in the place of the `forward` of regions and saved modules.

Each module that the policy has an action for gets an instance attribute `forward` that does it. Hooks, names, parameters
and the class stay as they are, and a copy of the model has a copy of the attribute, bound to the copied module.
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from types import MethodType
from typing import Any

from torch.compiler import is_compiling
from torch.nn import Module

from reactivate._compilers.graph import contexts_for
from reactivate._engine.kept_calls.choice import Choice, Unmatched
from reactivate._engine.kept_calls.site_log import current_log, serve
from reactivate._engine.record import Options
from reactivate._engine.run import run
from reactivate._loss.logits import call_by_rows
from reactivate._model.cache_watch import CacheWatch
from reactivate._model.selection import Selection
from reactivate._modules.paths import THE_MODEL
from reactivate._modules.standin import Cover
from reactivate._run import run_region, run_untraced
from reactivate._text.words import counted
from reactivate._types import DEVICE, Policy, Storage
from reactivate.policies._base import ReadyMade, interest_of, shortened

FORWARD = "forward"


class Handle:
    """A policy on a model; printed, it says which modules are recomputed and which layers beside them are not, and why.

    As a context manager it removes the policy at the end, unless the model had it before: if `apply` returned the handle
    that was there, the policy stays.

    Attributes:
        policy: the policy.
        regions: the paths of the modules that are recomputed.
        saved: the paths of the modules that are kept inside of regions.
        heads: the paths of the modules whose loss is computed by rows.
        kept: {path: reason} of the layers in the lists of the regions that are not recomputed.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.regions: tuple[str, ...] = ()
        self.saved: tuple[str, ...] = ()
        self.heads: tuple[str, ...] = ()
        self.kept: dict[str, str] = {}
        self._kinds: dict[str, list[str]] = {}  # the paths of the regions, by the names of their classes
        self._undo: list[weakref.ref[Module]] = []
        self._undo_policy: Callable[[], None] | None = None
        self._uses = 1  # calls of `apply` that returned it

    @staticmethod
    def of(model: Module) -> Handle | None:
        """The handle of the policy that is applied to `model`: of a copy, say. None if there is none."""
        found = forward_of(model)
        return None if found is None else found.applied.handle

    def remove(self) -> None:
        """Make the model what it was. A second time does nothing."""
        for reference in self._undo:
            module = reference()
            forward = None if module is None else vars(module).get(FORWARD)
            if module is not None and isinstance(forward, AppliedForward) and forward.applied.handle is self:
                forward.uncover(module)
        self._undo = []
        if self._undo_policy is not None:
            self._undo_policy()

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *error: object) -> None:
        self._uses -= 1
        if self._uses <= 0:
            self.remove()

    def __repr__(self) -> str:
        saved = f", saved={counted(len(self.saved), 'module')}" if self.saved else ""
        return f"Handle({self.policy!r}, regions={len(self.regions)}{saved})"

    def __str__(self) -> str:
        def named(paths: Iterable[str]) -> str:
            return shortened(path or THE_MODEL for path in paths)

        lines = [f"{self.policy!r}: {counted(len(self.regions), 'region')}, recomputed in backward."]
        lines += [f"  {kind}: {named(paths)}" for kind, paths in self._kinds.items()]
        if self.saved:
            lines += ["Saved inside of regions:", f"  {shortened(self.saved)}"]
        if self.heads:
            lines.append(f"Loss by rows: {named(self.heads)}.")
        if self.kept:
            lines.append("Beside the regions, not recomputed:")
        for reason in dict.fromkeys(self.kept.values()):
            lines.append(f"  {shortened(path for path, why in self.kept.items() if why == reason)}: {reason}")
        return "\n".join(lines)


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
        found = [self.placed(kind, module, path) for kind, path, module in kinds_in(chosen)]
        self.unmatched.regions = self.cache_watch.regions = len(chosen.regions)
        self.handle.kept = chosen.kept_beside()
        return found

    def placed(self, kind: type[AppliedForward], module: Module, path: str) -> AppliedForward:
        """Return what is to stand in for the `forward` of a module."""
        return kind(self, module, path, own_forward_of(module))

    def options_of(self, path: str, module: weakref.ref[Module]) -> Options:
        """The options of a region."""
        policy = self.policy.inside(path) if isinstance(self.policy, ReadyMade) else self.policy
        interest = interest_of(policy)
        choice = in_graph = None
        if interest.any_function or interest.functions or interest.names or interest.modules:
            choice = serve(Choice(policy, self.unmatched, module, path))
            in_graph = contexts_for(policy, module, path)
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


class AppliedForward(Cover):
    """Stand in for a module's `forward`: a part of the module, and copied with it."""

    @property
    def stands_for(self) -> type | None:
        """Return the kind of what the policy selects the module as; None where other modules are the reason."""
        return type(self)

    def __init__(self, applied: Applied, module: Module, path: str, hidden: Any = None) -> None:
        self.applied = applied
        self.path = path
        self.hidden = hidden
        self._module = weakref.ref(module)  # a cycle would keep the model's memory until the collector runs
        self.note(applied.handle)

    def note(self, handle: Handle) -> None:
        """Tell the handle what stands where, for it to be undone."""
        handle._undo.append(self._module)

    def uncover(self, module: Module) -> None:
        """Give `module` the `forward` that it had."""
        if self.hidden is None:
            del module.__dict__[FORWARD]
        else:
            module.__dict__[FORWARD] = self.hidden

    def original(self) -> Callable[..., Any]:
        """The module's own `forward`."""
        if self.hidden is not None:
            return self.hidden  # type: ignore[no-any-return]
        module = self.module()
        return MethodType(type(module).forward, module)

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """`original`, for who looks at what is called."""
        return self.original()

    def in_graph(self, *args: Any, **kwargs: Any) -> Any:
        """The call of the module's own `forward`, for torch.compile to trace."""
        # Dynamo knows no bound methods that are made while it traces.
        module = self.module()
        return type(module).forward(module, *args, **kwargs) if self.hidden is None else self.hidden(*args, **kwargs)

    def module(self) -> Module:
        """The module whose `forward` this is."""
        module = self._module()
        assert module is not None
        return module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def __deepcopy__(self, memo: dict[int, Any]) -> AppliedForward:
        make, parts = self.__reduce__()
        return make(*(copy.deepcopy(part, memo) for part in parts))

    def __reduce__(self) -> tuple[Callable[..., AppliedForward], tuple[Any, ...]]:
        return type(self), (self.applied, self.module(), self.path, self.hidden)


class RegionForward(AppliedForward):
    """The module is a region."""

    def __init__(self, applied: Applied, module: Module, path: str, hidden: Any = None) -> None:
        super().__init__(applied, module, path, hidden)
        self.options = applied.options_of(path, self._module)

    def note(self, handle: Handle) -> None:
        super().note(handle)
        handle.regions = (*handle.regions, self.path)
        handle._kinds.setdefault(type(self.module()).__name__, []).append(self.path)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        options = self.options
        if is_compiling():
            return run_region(run, options, self.in_graph, *args, **kwargs)
        watch = self.applied.cache_watch
        runner = run if watch.is_done else functools.partial(watch.run, self.path)
        return run_untraced(runner, options, self.original(), args, kwargs)


class SavedForward(AppliedForward):
    """The module is kept, where it is called inside of a region."""

    def note(self, handle: Handle) -> None:
        super().note(handle)
        handle.saved = (*handle.saved, self.path)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_compiling():
            return self.in_graph(*args, **kwargs)
        log = current_log()
        if log is not None:
            decision = log.choice.of_module(self.module(), self.path)
            if decision.is_of_interest:
                return log.call(decision, self.original(), args, kwargs)
        return self.original()(*args, **kwargs)


class HeadForward(AppliedForward):
    """The module returns logits whose loss is computed by rows."""

    def note(self, handle: Handle) -> None:
        super().note(handle)
        handle.heads = (*handle.heads, self.path)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return call_by_rows(self.original, self.path, args, kwargs)


def kinds_in(chosen: Selection) -> Iterator[tuple[type[AppliedForward], str, Module]]:
    """Yield the chosen modules, each with its path and the class of what is to stand in for its `forward`."""
    for kind, modules in ((RegionForward, chosen.regions), (SavedForward, chosen.saved), (HeadForward, chosen.heads)):
        yield from ((kind, path, module) for path, module in modules.items())


def own_forward_of(module: Module) -> Any:
    """Return the `forward` among the attributes of a module, of the user's or of a library; None if its class has it."""
    found = vars(module).get(FORWARD)
    return found.hidden if isinstance(found, AppliedForward) else found


def forwards_of(model: Module) -> Iterator[tuple[Module, AppliedForward]]:
    for module in model.modules():
        forward = vars(module).get(FORWARD)
        if isinstance(forward, AppliedForward):
            yield module, forward


def forward_of(model: Module) -> AppliedForward | None:
    return next((forward for _, forward in forwards_of(model)), None)

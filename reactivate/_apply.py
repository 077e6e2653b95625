"""`apply`: a policy for a whole model, in place, without renaming anything.

Each module that the policy has an action for gets an instance attribute `forward` that does it. Hooks, names, parameters
and the class stay as they are, and a copy of the model has a copy of the attribute, bound to the copied module.
"""

from __future__ import annotations

import copy
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import MethodType
from typing import Any

from torch import Tensor
from torch.compiler import is_compiling
from torch.nn import Module

from reactivate._blocks import blocks_of, siblings_of
from reactivate._cache_watch import CacheWatch
from reactivate._checkpoint import Determinism, make_options, run_in_graph
from reactivate._compilers.graph import contexts_for
from reactivate._compilers.jax import is_traced, run_traced
from reactivate._engine.kept_calls.choice import Choice, Unmatched
from reactivate._engine.kept_calls.site_log import current_log
from reactivate._engine.record import Options
from reactivate._engine.region import run
from reactivate._nearest import described
from reactivate._types import Action, Guard, Policy, Recompute, Save, Site
from reactivate.errors import UsageError
from reactivate.guards import DEFAULT
from reactivate.policies._base import ReadyMade, check_policy, interest_of, parts_of, shortened

FORWARD = "forward"


def apply(
    model: Module,
    policy: Policy,
    *,
    guards: Iterable[Guard] = DEFAULT,
    early_stop: bool = True,
    determinism: Determinism | None = None,
    replace: bool = False,
) -> Handle:
    """Let the modules of `model` save or recompute their activations as `policy` says.

    No parameter, buffer, submodule or state_dict key is renamed. Copies (`copy.deepcopy`, `pickle`, `torch.save`) have
    the policy applied as well, with state of their own.

    If `apply` is called again with an equal policy and the same options, it returns the handle that the model has and
    changes nothing. So it may stand in a hook that a trainer calls more than once, as Lightning calls `configure_model`.

    Args:
        model: changed in place, until `Handle.remove`.
        policy: see `reactivate.policies`. It says which modules are regions, and which calls inside of these are kept.
        guards, early_stop, determinism: as for `checkpoint`. By default the regions of a plan are not compared with their
            forwards (`determinism="metadata"`): checksums and recomputations to the end are not in its promise.

        replace: replace a policy that is applied to the model already. If the new one is refused, the old one stays.

    Returns:
        A handle. `print` it to see the regions, and the layers beside them that are kept. `Handle.remove` undoes it, as
        does the end of `with apply(...):`.

    Raises:
        UsageError: another policy is applied to the model already, and `replace` is not set; or a part of this one matches
            no module. (A part that selects ops or names is looked at when every region has run: then the forward raises.)

    Example:
        >>> import torch, reactivate
        >>> from reactivate import policies
        >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        >>> model = torch.nn.TransformerEncoder(layer, 4)
        >>> handle = reactivate.apply(model, policies.first_match(policies.save_ops("linear"), policies.full()))
        >>> handle.regions
        ('layers.0', 'layers.1', 'layers.2', 'layers.3')
        >>> handle.remove()
        >>> print(reactivate.apply(model, policies.recompute_every(2)))
        recompute_every(2): 2 regions, recomputed in backward.
          TransformerEncoderLayer: layers.0, layers.2
        Beside the regions, not recomputed:
          layers.1, layers.3: the policy does not select them
    """
    _check(model, policy)
    default = policy.determinism() if isinstance(policy, ReadyMade) else "first"
    options = make_options(guards, early_stop, determinism or default, None)
    if not replace:
        found = _forward_of(model)
        return _applied(model, policy, options) if found is None else _repeated(model, found, policy, options)
    taken = _take(model)
    try:
        old = {id(forward.applied): forward.applied.handle for _, forward in taken}.values()
        _refuse_part_of_larger(model, old)
        handle = _applied(model, policy, options)
    except BaseException:
        _give_back(taken)
        raise
    for replaced in old:
        replaced.remove()
    return handle


def _applied(model: Module, policy: Policy, options: Options) -> Handle:
    applied = Applied(policy, options)
    undo = policy.applied_to(model) if isinstance(policy, ReadyMade) else None
    try:
        applied.attach(model)
    except BaseException:
        if undo is not None:
            undo()
        raise
    applied.handle._undo_policy = undo
    return applied.handle


@contextmanager
def paused(model: Module) -> Iterator[None]:
    """Make the model what it is without a policy, inside of the context."""
    taken = _take(model)
    try:
        yield
    finally:
        _give_back(taken)


def _take(model: Module) -> list[tuple[Module, AppliedForward]]:
    taken = list(_forwards_of(model))
    for module, forward in taken:
        forward.uncover(module)
    return taken


def _give_back(taken: list[tuple[Module, AppliedForward]]) -> None:
    for module, forward in taken:
        module.__dict__[FORWARD] = forward


def _check(model: Any, policy: Any) -> None:
    if isinstance(model, ReadyMade):
        raise UsageError(f"apply takes the model first, then the policy: apply(model, policy); got {described(model)}.")
    if isinstance(model, (list, tuple)):
        raise UsageError(
            f"apply takes one torch.nn.Module; got {described(model)}. Call apply(...) for each of several models."
        )
    if isinstance(model, type) and issubclass(model, Module):
        raise UsageError(
            f"apply takes a model, and {model.__name__} is its class: write apply({model.__name__}(...), policy)."
        )
    if not isinstance(model, Module):
        raise UsageError(f"apply takes a torch.nn.Module; got {described(model)}. For a function use checkpoint().")
    if isinstance(policy, (Tensor, Mapping)) or type(policy).__name__ == "DataLoader":
        raise UsageError(
            f"apply takes no example arguments; got {described(policy)} for its policy. Write apply(model, "
            "policies.full()); the functions that run the model are explain(model, x), verify(model, x) and plan(model, x)."
        )
    check_policy(policy, "apply")


class Handle:
    """A policy on a model; printed, it says which modules are recomputed and which layers beside them are not, and why.

    As a context manager it removes the policy at the end, unless the model had it before: if `apply` returned the handle
    that was there, the policy stays.

    Attributes:
        policy: the policy.
        regions: the paths of the modules that are recomputed.
        saved: the paths of the modules that are kept inside of regions.
        kept: {path: reason} of the layers in the lists of the regions that are not recomputed.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.regions: tuple[str, ...] = ()
        self.saved: tuple[str, ...] = ()
        self.kept: dict[str, str] = {}
        self._kinds: dict[str, list[str]] = {}  # the paths of the regions, by the names of their classes
        self._undo: list[weakref.ref[Module]] = []
        self._undo_policy: Callable[[], None] | None = None
        self._uses = 1  # calls of `apply` that returned it

    @staticmethod
    def of(model: Module) -> Handle | None:
        """The handle of the policy that is applied to `model`: of a copy, say. None if there is none."""
        found = _forward_of(model)
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
        saved = f", saved={len(self.saved)} modules" if self.saved else ""
        return f"Handle({self.policy!r}, regions={len(self.regions)}{saved})"

    def __str__(self) -> str:
        count = len(self.regions)
        lines = [f"{self.policy!r}: {count} region{'' if count == 1 else 's'}, recomputed in backward."]
        lines += [
            f"  {kind}: {shortened(path or 'the model itself' for path in paths)}"
            for kind, paths in self._kinds.items()
        ]
        if self.saved:
            lines += ["Saved inside of regions:", f"  {shortened(self.saved)}"]
        reasons: dict[str, list[str]] = {}
        for path, reason in self.kept.items():
            reasons.setdefault(reason, []).append(path)
        if reasons:
            lines.append("Beside the regions, not recomputed:")
            lines += [f"  {shortened(paths)}: {reason}" for reason, paths in reasons.items()]
        return "\n".join(lines)


class Applied:
    """One policy on one model: what its regions share."""

    def __init__(self, policy: Policy, options: Options) -> None:
        self.policy = policy
        self.options = options
        self.handle = Handle(policy)
        self.unmatched = Unmatched(policy, "apply")
        self.cache_watch = CacheWatch()

    def attach(self, model: Module) -> None:
        """Find the regions and the saved modules of `model`, and take the place of their `forward`."""
        sites = _sites_of(model)
        regions, saved = self.choose(model, sites)
        for kind, modules in ((RegionForward, regions), (SavedForward, saved)):
            for path, module in modules.items():
                module.__dict__[FORWARD] = kind(self, module, path, vars(module).get(FORWARD))
        self.unmatched.regions = self.cache_watch.regions = len(regions)
        self.handle.kept = _kept_beside(model, sites, regions)

    def choose(self, model: Module, sites: list[tuple[Module, Site]]) -> tuple[dict[str, Module], dict[str, Module]]:
        """Return the regions and the saved modules of `model`, by their paths."""
        blocks = [site.path for _, site in sites if site.block is not None]
        for part in parts_of(self.policy):
            if isinstance(part, ReadyMade):
                part.check_blocks(blocks)
        actions = self._decide(sites)
        regions = {path: module for path, (module, action) in actions.items() if isinstance(action, Recompute)}
        inside = {id(inner) for module in regions.values() for inner in module.modules()}
        saved = {
            path: module
            for path, (module, action) in actions.items()
            if isinstance(action, Save) and id(module) in inside
        }
        self._refuse_unmatched(model, sites, regions, saved)
        return regions, saved

    def _decide(self, sites: list[tuple[Module, Site]]) -> dict[str, tuple[Module, Action | None]]:
        actions: dict[str, tuple[Module, Action | None]] = {}
        for module, site in sites:
            action = self.policy(site)
            if action is None and interest_of(self.policy).calls:  # it may be another call that is saved
                action = next((found for found in self._of_parts(site) if isinstance(found, Save)), None)
            actions[site.path] = (module, action)
        return actions

    def _of_parts(self, site: Site) -> Iterable[Action | None]:
        return (part(site) for part in parts_of(self.policy) if isinstance(part, ReadyMade))

    def _refuse_unmatched(
        self,
        model: Module,
        sites: list[tuple[Module, Site]],
        regions: dict[str, Module],
        saved: dict[str, Module],
    ) -> None:
        """Rule 17: what selects modules must have selected some."""
        for _, site in sites:
            for part in list(self.unmatched.parts):
                action = part(site)
                if isinstance(action, Recompute) or (action is not None and site.path in saved):
                    self.unmatched.parts.remove(part)
        about_modules = [part for part in self.unmatched.parts if not _is_about_functions(part)]
        if about_modules:
            blocks = ", ".join(site.path for _, site in sites if site.block is not None)
            names = blocks or "none: name modules with recompute_modules, or make it one region, checkpoint(model)"
            where = "" if regions else " (and no module is recomputed, inside of which something could be saved)"
            raise UsageError(
                f"apply: {about_modules[0]} matches nothing in {type(model).__name__}{where}. Its blocks are {names}. "
                f"Its modules are {shortened(site.path for _, site in sites if site.path)}."
            )
        if self.unmatched.parts and not regions:
            raise UsageError(
                f"apply: {self.unmatched.parts[0]} saves calls inside of regions, and the policy makes no region. "
                "Combine it with one that does: first_match(save_ops(...), full())."
            )

    def options_of(self, path: str, module: weakref.ref[Module]) -> Options:
        """The options of a region."""
        policy = self.policy.inside(path) if isinstance(self.policy, ReadyMade) else self.policy
        interest = interest_of(policy)
        choice = in_graph = None
        if interest.any_function or interest.functions or interest.names or interest.modules:
            choice = Choice(policy, self.unmatched, module, path)
            in_graph = contexts_for(policy, module, path)
        return self.options.of(path, choice, in_graph)

    def __deepcopy__(self, memo: dict[int, Any]) -> Applied:
        return Applied._copied(self.policy, self.options, self.handle.kept)

    def __reduce__(self) -> tuple[Callable[..., Applied], tuple[Any, ...]]:
        return Applied._copied, (self.policy, self.options, self.handle.kept)

    @classmethod
    def _copied(cls, policy: Policy, options: Options, kept: dict[str, str]) -> Applied:
        applied = cls(policy, options)
        applied.handle.kept = dict(kept)
        applied.unmatched.parts = []  # that is the original's affair
        applied.cache_watch.is_done = True  # so is that
        return applied


class AppliedForward:
    """Stand in for a module's `forward`: a part of the module, and copied with it."""

    def __init__(self, applied: Applied, module: Module, path: str, hidden: Any = None) -> None:
        self.applied = applied
        self.path = path
        self.hidden = hidden  # what stood there before
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
        return self._copied(
            copy.deepcopy(self.applied, memo),
            copy.deepcopy(self._module(), memo),
            self.path,
            copy.deepcopy(self.hidden, memo),
        )

    def __reduce__(self) -> tuple[Callable[..., AppliedForward], tuple[Any, ...]]:
        return self._copied, (self.applied, self._module(), self.path, self.hidden)

    @classmethod
    def _copied(cls, applied: Applied, module: Module | None, path: str, hidden: Any) -> AppliedForward:
        assert module is not None
        return cls(applied, module, path, hidden)


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
            return run_in_graph(self.in_graph, args, kwargs, options)
        original = self.original()
        if "torchax" in sys.modules and is_traced(original, args, kwargs):
            return run_traced(original, args, kwargs, options)
        watch = self.applied.cache_watch
        if not watch.is_done:
            return watch.run(self.path, original, args, kwargs, options)
        return run(original, args, kwargs, options)


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


def _sites_of(model: Module) -> list[tuple[Module, Site]]:
    """Every module, with its site. They share what policies count."""
    blocks = {id(module): number for number, module in enumerate(blocks_of(model).values())}
    counts: dict[Any, int] = {}
    return [
        (module, Site(path, module=module, block=blocks.get(id(module)), blocks=len(blocks), counts=counts))
        for path, module in model.named_modules()
    ]


def _is_about_functions(part: Any) -> bool:
    interest = interest_of(part)
    return interest.any_function or bool(interest.functions) or interest.names


def _kept_beside(model: Module, sites: list[tuple[Module, Site]], regions: dict[str, Module]) -> dict[str, str]:
    """Return {path: reason} of the layers with parameters that share a list with a block that is a region."""
    blocks = {id(module): site.path for module, site in sites if site.block is not None}
    recomputed = {id(inner) for module in regions.values() for inner in module.modules()}
    lists = {path.rpartition(".")[0]: path for path, module in regions.items() if id(module) in blocks}
    kept: dict[str, str] = {}
    for path in lists.values():
        for place, sibling in siblings_of(model, path).items():
            is_around = any(id(inner) in recomputed for inner in sibling.modules())
            if not is_around and any(True for _ in sibling.parameters()):
                kept[place] = _reason(sibling, id(sibling) in blocks)
    return kept


def _reason(module: Module, is_block: bool) -> str:
    if is_block:
        return "the policy does not select them"
    if any(True for _ in module.children()):
        return "not among the repeated layers; add recompute_modules(...) for them"
    return "single layers without modules inside, of which recomputation would drop little"


def _forwards_of(model: Module) -> Iterator[tuple[Module, AppliedForward]]:
    for module in model.modules():
        forward = vars(module).get(FORWARD)
        if isinstance(forward, AppliedForward):
            yield module, forward


def _forward_of(model: Module) -> AppliedForward | None:
    return next((forward for _, forward in _forwards_of(model)), None)


def _refuse_part_of_larger(model: Module, handles: Iterable[Handle]) -> None:
    inside = set(map(id, model.modules()))
    for handle in handles:
        modules = [module for reference in handle._undo if (module := reference()) is not None]
        if not all(id(module) in inside for module in modules):
            raise UsageError(
                f"apply(replace=True): {handle!r} is applied to a larger model, of which this {type(model).__name__} is a "
                "part. Replace it there, or remove that handle first."
            )


def _repeated(model: Module, found: AppliedForward, policy: Policy, options: Options) -> Handle:
    """Return the handle that `model` has, if to apply the policy again would change nothing."""
    applied = found.applied
    if applied.policy != policy or applied.options != options:
        difference = "The one that is given now is another, or has other options"
    elif _placed_on(model, applied) != _chosen_on(model, policy, options):
        difference = "The one that is given now is equal to it, but selects other modules, or modules by other paths"
    else:
        applied.handle._uses += 1
        return applied.handle
    raise UsageError(
        f"apply: a policy is applied to this model already, {applied.handle!r} (at `{found.path}`). {difference}. Write "
        "apply(model, policy, replace=True), or remove the first one: reactivate.Handle.of(model).remove(). To have both, "
        "apply one policy made of both."
    )


def _placed_on(model: Module, applied: Applied) -> set[tuple[int, type, str]]:
    return {
        (id(module), type(forward), forward.path if forward.applied is applied else f"{forward.path} of another policy")
        for module, forward in _forwards_of(model)
    }


def _chosen_on(model: Module, policy: Policy, options: Options) -> set[tuple[int, type, str]]:
    regions, saved = Applied(policy, options).choose(model, _sites_of(model))
    return {
        (id(module), kind, path)
        for kind, modules in ((RegionForward, regions), (SavedForward, saved))
        for path, module in modules.items()
    }

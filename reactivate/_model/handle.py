"""The handle of a policy on a model, and what stands in the place of the `forward` of a module until it is removed.

Each module that the policy has an action for gets an instance attribute `forward` that does it. Hooks, names, parameters
and the class stay as they are, and a copy of the model has a copy of the attribute, bound to the copied module.
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from types import CodeType, MethodType
from typing import TYPE_CHECKING, Any

from torch.nn import Module

from reactivate._modules.paths import THE_MODEL
from reactivate._modules.standin import NAME, Cover, cover_in
from reactivate._snapshot.caches import cached_by_class
from reactivate._snapshot.shadows import forget_shadows
from reactivate._text.words import counted, described
from reactivate._types import Policy
from reactivate.errors import UsageError
from reactivate.policies._base import shortened

if TYPE_CHECKING:
    from reactivate._model.applied import Applied


class Handle:
    """A policy on a model; printed, it says which modules are recomputed and which layers beside them are not, and why.

    As a context manager it removes the policy at the end, unless the model had it before: if `apply` returned the handle
    that was there, the policy stays.

    Attributes:
        policy: the policy.
        regions: the paths of the modules, and of the spans of modules, that are recomputed.
        saved: the paths of the modules that are kept inside of regions.
        heads: the paths of the modules whose loss is computed by rows.
        budgets: the paths of the modules of which torch's compiler keeps a share.
        kept: {path: reason} of the layers in the lists of the regions that are not recomputed.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.regions: tuple[str, ...] = ()
        self.saved: tuple[str, ...] = ()
        self.heads: tuple[str, ...] = ()
        self.budgets: tuple[str, ...] = ()
        self.kept: dict[str, str] = {}
        self._kinds: dict[str, list[str]] = {}  # the paths of the regions, by the names of their classes
        self._undo: list[weakref.ref[Module]] = []
        self._undo_policy: Callable[[], None] | None = None
        self._uses = 1  # calls of `apply` that returned it
        self._is_removed = False

    @staticmethod
    def of(model: Module) -> Handle | None:
        """The handle of the policy that is applied to `model`: of a copy, say. None if there is none.

        Raises:
            UsageError: it is no module.
        """
        if not isinstance(model, Module):
            raise UsageError(
                f"Handle.of takes the model that a policy is applied to, a module; got {described(model)}."
            )
        found = forward_of(model)
        return None if found is None else found.applied.handle

    def add_region(self, kind: str, path: str) -> None:
        """Take note of a region, of a class with this name."""
        self.regions = (*self.regions, path)
        self._kinds.setdefault(kind, []).append(path)

    def remove(self) -> None:
        """Make the model what it was, and let go of copies of its buffers. A second time does nothing."""
        for reference in self._undo:
            module = reference()
            forward = None if module is None else applied_to(module)
            if module is not None and forward is not None and forward.applied.handle is self:
                forward.uncover(module)
        self._undo = []
        self._is_removed = True
        forget_shadows()
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
        removed = ", removed" if self._is_removed else ""
        return f"Handle({self.policy!r}, regions={len(self.regions)}{saved}{removed})"

    def __str__(self) -> str:
        def named(paths: Iterable[str]) -> str:
            return shortened(path or THE_MODEL for path in paths)

        regions = counted(len(self.regions), "region")
        if self._is_removed:
            return f"{self.policy!r}: removed. The model is what it was without it; it had {regions}."
        lines = [f"{self.policy!r}: {regions}, recomputed in backward."]
        lines += [f"  {kind}: {named(paths)}" for kind, paths in self._kinds.items()]
        if self.saved:
            lines += ["Saved inside of regions:", f"  {shortened(self.saved)}"]
        if self.heads:
            lines.append(f"Loss by rows: {named(self.heads)}.")
        if self.budgets:
            lines.append(f"Recomputed in part, by torch's compiler: {named(self.budgets)}.")
        if self.kept:
            lines.append("Beside the regions, not recomputed:")
        for reason in dict.fromkeys(self.kept.values()):
            lines.append(f"  {shortened(path for path, why in self.kept.items() if why == reason)}: {reason}")
        return "\n".join(lines)


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

    @property
    def forward(self) -> Any:
        """The method that is to stand among the module's attributes, with the signature of the module's own `forward`.

        torch.compile knows a method by its code, and any other object by its identity: only with methods do blocks that are
        compiled one by one share a graph.
        """
        if self.hidden is not None:
            return self
        kind, function = type(self.module()), _through(self)
        function.__code__ = _code_in_place_of(kind)
        functools.update_wrapper(function, kind.forward, updated=())
        function.__name__ = NAME  # by which pickle finds the method
        return MethodType(function, self)

    def place(self) -> None:
        """Stand in for the `forward` of the module from here on."""
        self.module().__dict__[NAME] = self.forward

    def uncover(self, module: Module) -> None:
        """Give `module` the `forward` that it had."""
        if self.hidden is None:
            del module.__dict__[NAME]
        else:
            module.__dict__[NAME] = self.hidden

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

    @property
    def __code__(self) -> CodeType:
        """The code of `original`, where torch.export reads in which line a model begins."""
        return self.original().__code__

    def in_graph(self, *args: Any, **kwargs: Any) -> Any:
        """The call of the module's own `forward`, for torch.compile to trace."""
        # Dynamo knows no bound methods that are made while it traces.
        module = self.module()
        return type(module).forward(module, *args, **kwargs) if self.hidden is None else self.hidden(*args, **kwargs)

    def module(self) -> Module:
        """The module whose `forward` this is."""
        module = self._module()
        if module is None:
            raise UsageError(
                "A module with a policy of reactivate.apply was copied by `copy.copy`, and the module itself is gone, which "
                "the copy would run. Copy it by `copy.deepcopy`, or keep the module."
            )
        return module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def __deepcopy__(self, memo: dict[int, Any]) -> AppliedForward:
        make, parts = self.__reduce__()
        return make(*(copy.deepcopy(part, memo) for part in parts))

    def __reduce__(self) -> tuple[Callable[..., AppliedForward], tuple[Any, ...]]:
        return type(self), (self.applied, self.module(), self.path, self.hidden)


def applied_to(module: Module) -> AppliedForward | None:
    """Return what stands in the place of the `forward` of a module; None if nothing of ours does."""
    return _applied_in(vars(module).get(NAME))


def _applied_in(item: Any) -> AppliedForward | None:
    cover = cover_in(item)
    return cover if isinstance(cover, AppliedForward) else None


def forwards_of(model: Module) -> Iterator[tuple[Module, AppliedForward]]:
    """Yield what stands in the modules of a model; of several in one module, the outermost first."""
    for module in model.modules():
        forward = applied_to(module)
        while forward is not None:
            yield module, forward
            forward = _applied_in(forward.hidden)


def forward_of(model: Module) -> AppliedForward | None:
    return next((forward for _, forward in forwards_of(model)), None)


def _through(cover: AppliedForward | None) -> Any:
    """Return the function of the method of a cover. Bound to the module, as accelerate binds it, it does the same."""

    def bound_to(module: Any) -> Any:  # a function of its own: dynamo looks at what code of a graph closes over
        if cover is not None and module is cover._module():
            return cover
        raise UsageError(
            f"The function of {type(module).__name__}.forward was taken out of its method (`forward.__func__`) and bound to "
            "a copy of the module. Do that before reactivate.apply, or wrap the method."
        )

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return (self if isinstance(self, AppliedForward) else bound_to(self))(*args, **kwargs)

    return forward


@cached_by_class
def _code_in_place_of(kind: type[Module]) -> CodeType:
    """Return the code of such a function, a copy for each class of modules: of one code come few graphs."""
    return _through(None).__code__.replace(co_name=f"forward of {kind.__name__}")  # type: ignore[no-any-return]

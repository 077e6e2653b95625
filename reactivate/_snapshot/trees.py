"""Trees of modules: the structure that a walk has found, taken again for as long as a walk would find the same.

A look whether the modules are still made of the same parts costs less than a walk over them. As long as a region has the
tree, the next one takes that. Between the steps of a training run its structure is kept, with modules held weakly, and so
are their attributes where these hold anything else: if the other objects that the tree leads to hold values that cannot
change, and each other. So what is kept holds no module and no tensor.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Sequence
from enum import Enum
from itertools import chain
from logging import Logger
from operator import is_
from types import BuiltinFunctionType, FunctionType, ModuleType, NoneType
from typing import Any
from weakref import WeakValueDictionary, ref

from torch import Tensor
from torch.jit import ScriptModule
from torch.nn import Module

from reactivate._modules.standin import cover_in
from reactivate._snapshot.cached_results import CACHED
from reactivate._snapshot.caches import WeakIdentitySet, is_importable, is_in_its_module
from reactivate._snapshot.held import ATOMS
from reactivate._snapshot.holders import Contents, FunctionsHolder, Holder
from reactivate._snapshot.module_walk import ModuleWalk
from reactivate._snapshot.parts import Parts
from reactivate._snapshot.quick_look import QuickLook, others_among
from reactivate._snapshot.unseen_writes import NamesOfWriters
from reactivate._torch.autograd import has_graph
from reactivate._torch.flags import ask
from reactivate._torch.modules import GLOBAL_FORWARD_HOOKS, GLOBAL_HOOKS
from reactivate._xla.fence import fences

LARGE_TREE = 64
"""The number of modules up to which all of them are noted for every region."""

_FEW_HOLDERS = 12  # to ask fewer one by one takes no longer than to ask them together
_MOST_MISSES = 4  # in a row, after which a tree is not kept any more: its objects change with every call


def _nothing() -> None:
    """Return what stands for a moment that there is none of."""


class Tree:
    """Some modules, and the objects that they lead to, as a walk has found them.

    Attributes:
        modules, kinds: every module, outermost first, and their classes.
        parts: what they are made of now.
        holders: the objects whose contents count; see `record`.
        look: a quick look at these objects, if they were there before.
        tensors: tensors in attributes, and in the objects.
        generators, scripts, is_lazy, has_wrappers: as of the walk.
        names: what code that the modules lead to names.
        scripted: those of the modules that TorchScript has compiled; they live in C++.
        stateful: those with a state protocol.
        roots: other modules that attributes lead to, of a tree of one module.
        moment: the moment of it that other regions have, if it is light; see `ReachedModules`.
        kept: the structure that is kept, if it is, of a tree of which there is no more to say (see `has_more`): regions to
            come find in `small_layout` which tensors were small.
    """

    holders: Sequence[Holder] = ()
    contents: Sequence[Contents] = ()
    look: QuickLook | None = None
    tensors: Sequence[Tensor] = ()
    # What a tree that was kept does not have:
    scripted: Sequence[Module] = ()
    stateful: Sequence[Any] = ()
    generators: tuple[Any, ...] = ()
    scripts: tuple[Any, ...] = ()
    roots: Sequence[Module] = ()
    is_lazy = has_wrappers = False
    is_settled = True  # whether holders and parts tell all that a walk would find by now
    moment: Callable[[], Any] = staticmethod(_nothing)

    def __init__(self, walk: ModuleWalk) -> None:
        self.modules: Sequence[Module] = walk.modules
        self.kinds = list(map(type, walk.modules))
        self.scripted = [module for module in walk.modules if isinstance(module, ScriptModule)]
        own = [item for item in walk.modules if item not in self.scripted] if self.scripted else walk.modules
        self.parts = Parts([module.__dict__ for module in own])
        self.stateful = [module for module in own if hasattr(type(module), "recompute_state")]
        self.holders = walk.holders
        self.contents = [holder.record() for holder in walk.holders]
        self.tensors = walk.tensors
        self.generators, self.scripts, self.is_lazy = walk.generators, walk.scripts, walk.is_lazy
        self.has_wrappers = walk.has_wrappers
        self.is_settled = walk.is_settled and not (walk.scripts or walk.is_lazy or walk.has_wrappers)
        self.names: Callable[[], NamesOfWriters] = walk.code.names
        self.kept: KeptTree | None = None

    @property
    def targets(self) -> Collection[int]:
        """Return the ids of the objects."""
        return _ids_of(self.holders) if self.kept is None else self.kept.targets

    def still_holds(self) -> bool:
        """Return whether a walk would find the same now, and modules and objects hold what they held."""
        return (
            self.parts.are_current()
            and list(map(type, self.modules)) == self.kinds
            and all(map(is_, map(vars, self.modules), self.parts.namespaces))
            and not (any(self.parts.hooks) or any(GLOBAL_HOOKS))
            and not any(map(has_graph, self.tensors))
            and not (self.holders and self._others())
        )

    def _others(self) -> list[int]:
        others, self.look = _others(self.holders, self.contents, self.look)
        return others

    @property
    def has_more(self) -> bool:
        """Return whether there is more to say of the modules than their parts and holders do."""
        return bool(self.scripts or self.generators or self.is_lazy or self.stateful or self.has_wrappers)


class KeptTree:
    """The structure of a tree, without the tree.

    Args:
        tree: what a walk has found.
        forget: called when one of the modules dies.

    Attributes:
        small_layout: which of the tensors that are state were small when a region began last; see `TensorStates`.
        live: the last tree of this structure, if a region has it still.
        targets: the ids of the objects.
    """

    __slots__ = (
        *("_attributes", "_children", "_contents", "_covers", "_holders", "_kinds", "_known", "_layout", "_look"),
        *("_modules", "_names", "_nones", "_versions", "live", "small_layout", "targets"),
    )

    def __init__(self, tree: Tree, known: dict[int, Any], forget: Any) -> None:
        parts = tree.parts
        self._modules = [ref(module, forget) for module in tree.modules]
        self._kinds = tree.kinds
        self._layout, self._holders, self._contents = parts.layout, tree.holders, tree.contents
        self._look: QuickLook | None = None
        self.targets = _ids_of(tree.holders)
        self._nones = [entry is None for entry in parts.entries]
        self._children = list(map(id, parts.layout.children(parts.entries)))  # they live, or the tree is forgotten
        self._known = known  # objects that attributes and objects hold, which lead nowhere else, by their ids
        self._covers: dict[int, ref[Any]] = {}
        self._attributes: Sequence[Any] | None = None
        self._hold(parts.attributes)
        self._versions = parts.versions
        names = tree.names()
        self._names = lambda: names
        self.small_layout: Any = None
        self.live: Callable[[], Tree | None] = ref(tree)

    def again(self) -> Tree | None:
        """Return the tree as it is now, None if a walk might find something else."""
        tree = self.live()
        if tree is not None and tree.is_settled and tree.still_holds():
            return tree
        modules: list[Any] = list(map(ask, self._modules))
        if list(map(type, modules)) != self._kinds:
            return None
        parts = Parts(list(map(vars, modules)), self._layout)
        if parts.versions is not None and parts.versions == self._versions:
            attributes = self._attributes
            parts.attributes = self._attributes_of(parts) if attributes is None or self._covers else attributes
        elif not self._compare(parts):
            return None
        if are_hooked(parts) or (self._holders and not self._are_contents_alike()):
            return None
        tree = Tree.__new__(Tree)
        tree.modules, tree.kinds, tree.parts = modules, self._kinds, parts
        if self._holders:
            tree.holders, tree.contents, tree.look = self._holders, self._contents, self._look
        if self._attributes is None:
            found = [item for item in parts.attributes if isinstance(item, Tensor)]
            tree.tensors = [item for item in found if not has_graph(item)]
            tree.is_settled = len(found) == len(tree.tensors)
            parts.hold()
        tree.names, tree.kept = self._names, self
        self.live = ref(tree)
        return tree

    def _attributes_of(self, parts: Parts) -> Sequence[Any]:
        """Return the attributes. What covers a `forward` is held weakly: its policy may lead to the model."""
        if self._attributes is None:
            return self._layout.attributes(parts.namespaces)
        if not self._covers:
            return self._attributes
        found = [*self._attributes]
        for index, reference in self._covers.items():
            found[index] = reference()
        return found

    def _hold(self, attributes: Sequence[Any]) -> None:
        self._covers = {index: ref(item) for index, item in enumerate(attributes) if cover_in(item) is not None}
        found = [None if index in self._covers else item for index, item in enumerate(attributes)]
        self._attributes = found if all(map(self._is_known, found)) else None

    def _is_known(self, item: Any) -> bool:
        return type(item) in ATOMS or self._known.get(id(item)) is item

    def _compare(self, parts: Parts) -> bool:
        """Return whether the modules still lead to the same objects, whatever values they have by now."""
        found = self._layout.read(parts.namespaces)
        if found is None:
            return False
        attributes, entries = found
        if list(map(id, self._layout.children(entries))) != self._children:
            return False
        if [entry is None for entry in entries] != self._nones:
            return False
        before = self._attributes_of(parts)
        if not all(map(is_, attributes, before)) or self._attributes is None:
            if not all(self._is_known(item) or _is_plain_tensor(item) or covers_nothing(item) for item in attributes):
                return False
            self._hold(attributes)
        parts.attributes, parts.entries = attributes, entries
        self._versions = parts.versions
        return True

    def _are_contents_alike(self) -> bool:
        changed, self._look = _others(self._holders, self._contents, self._look)
        if changed:
            self._look = None
            contents = [*self._contents]
            for index in changed:
                contents[index] = self._holders[index].record()
                if not all(map(self._is_known, contents[index])):
                    return False
            self._contents = contents
        return True


def _others(
    holders: Sequence[Holder], contents: Sequence[Contents], look: QuickLook | None
) -> tuple[list[int], QuickLook | None]:
    """Return the numbers of the objects that hold something else by now, and a quick look for the next time."""
    if look is not None:
        return look.others(), look
    others = others_among(range(len(holders)), holders, contents)
    is_worth_it = not others and len(holders) >= _FEW_HOLDERS
    return others, QuickLook(holders, contents) if is_worth_it else None


def _ids_of(holders: Iterable[Holder]) -> frozenset[int]:
    return frozenset(id(holder.target) for holder in holders)


def _is_plain_tensor(item: Any) -> bool:
    return type(item) is Tensor and not vars(item)


def are_hooked(parts: Parts) -> bool:
    """Return whether hooks run in a forward: what they close over is looked at in each."""
    return any(parts.hooks[: 2 * len(parts.namespaces)]) or any(GLOBAL_FORWARD_HOOKS)


class Trees:
    """Trees by the ids of their roots: those that are kept, and others that regions have."""

    def __init__(self) -> None:
        self.kept: dict[int, KeptTree] = {}
        self._live: WeakValueDictionary[tuple[int, ...], Tree] = WeakValueDictionary()
        self._misses: dict[int, tuple[ref[Module], int]] = {}  # how many there were in a row

    def again(self, roots: Sequence[Module]) -> Tree | None:
        """Return the tree under some roots as it is now, None if a walk has to find it."""
        root = roots[0]
        kept = self.kept.get(id(root)) if len(roots) == 1 else None
        if kept is None:
            live = self._live.get(tuple(map(id, roots)))
            return live if live is not None and live.still_holds() else None
        tree = kept.again()
        if tree is None:
            self.kept.pop(id(root), None)
            self._miss(root)
        elif self._misses:
            self._misses.pop(id(root), None)
        return tree

    def _miss(self, root: Module) -> None:
        key = id(root)
        self._misses[key] = ref(root, functools.partial(self._misses.pop, key)), self._misses_of(root) + 1

    def _misses_of(self, root: Module) -> int:
        reference, count = self._misses.get(id(root), (None, 0))
        return count if reference is not None and reference() is root else 0

    def note(self, roots: Sequence[Module], tree: Tree) -> None:
        """Note a tree for as long as a region has it."""
        if tree.kept is None and tree.is_settled:
            self._live[tuple(map(id, roots))] = tree

    def keep(self, root: Module, tree: Tree) -> None:
        """Keep the tree under `root`, if that keeps nothing else alive."""
        if tree.has_more or self._misses_of(root) >= _MOST_MISSES or are_hooked(tree.parts):
            return
        known = _all_that_is_held(tree)
        if known is None:
            self._miss(root)
        else:
            key, trees = id(root), self.kept
            tree.kept = trees[key] = KeptTree(tree, known, lambda _: trees.pop(key, None))


whole_trees = Trees()
single_modules = Trees()
"""Modules without what is inside of them: those of large trees (see `reaching`)."""
large_roots = WeakIdentitySet()
"""Modules under which a walk has found more than `LARGE_TREE` modules."""
unseen_writers = WeakIdentitySet()
"""Those of them with code that may write to tensors without a new version."""


def tree_under(roots: Sequence[Module]) -> Tree:
    """Return the tree of some modules as it is now."""
    tree = whole_trees.again(roots)
    if tree is not None:
        return tree
    walk = ModuleWalk().over(roots)
    tree = Tree(walk)
    if len(roots) == 1 and len(walk.roots) == 1:
        whole_trees.keep(roots[0], tree)
    whole_trees.note(roots, tree)
    tree.parts.hold()
    if len(tree.modules) > LARGE_TREE and not (walk.scripts or walk.is_lazy or fences()):
        for root in roots:  # what else they lead to may be small
            if root._modules:
                large_roots.add(root)
                if walk.code.may_write_unseen():
                    unseen_writers.add(root)
    return tree


def tree_at(module: Module) -> Tree:
    """Return one module as a tree without children."""
    tree = single_modules.again((module,))
    if tree is not None:
        return tree
    walk = ModuleWalk().at(module)
    tree = Tree(walk)
    tree.roots = walk.roots
    if not walk.roots:
        single_modules.keep(module, tree)
    single_modules.note((module,), tree)
    tree.parts.hold()
    return tree


# -- what can be held -------------------------------------------------------------------------------------------------


def _all_that_is_held(tree: Tree) -> dict[int, Any] | None:
    """Return what holders and attributes hold, by id; None if to hold it could hold a module or a tensor."""
    noted = {id(holder.target): holder.target for holder in tree.holders}
    for functions in [holder.target for holder in tree.holders if type(holder) is FunctionsHolder]:
        noted.update(zip(map(id, functions), functions))
    known = dict(noted)
    kept = [holder.kept_with(contents) for holder, contents in zip(tree.holders, tree.contents)]
    if None in kept:
        return None
    for item in chain.from_iterable(kept):  # type: ignore[arg-type]
        if type(item) not in ATOMS:
            if not (id(item) in noted or _is_fixed(item, noted)):
                return None
            known[id(item)] = item
    for item in tree.parts.attributes:
        if type(item) not in ATOMS and not covers_nothing(item):
            if id(item) in noted or _is_fixed(item, noted):
                known[id(item)] = item
            elif not _is_plain_tensor(item):
                return None
    return known


def covers_nothing(item: Any) -> bool:
    """Return whether an attribute is one of ours in the place of a `forward` of the class."""
    cover = cover_in(item)
    return cover is not None and not cover.hides_users


def _is_fixed(item: Any, noted: dict[int, Any]) -> bool:
    """Return whether to hold an item is to hold nothing that could go, but for what is noted."""
    kind = type(item)
    if issubclass(kind, type):
        return is_in_its_module(item)
    if kind is FunctionType:
        return is_in_its_module(item) or _leads_nowhere(item)
    if kind is BuiltinFunctionType:
        return isinstance(item.__self__, (ModuleType, NoneType))
    if kind is CACHED:
        return is_in_its_module(item)
    if kind is tuple or kind is frozenset:
        return all(type(inner) in ATOMS or id(inner) in noted or _is_fixed(inner, noted) for inner in item)
    if kind is Logger:
        return item.manager.loggerDict.get(item.name) is item
    return kind in ATOMS or (issubclass(kind, Enum) and is_in_its_module(kind))


def _leads_nowhere(fn: FunctionType) -> bool:
    """Return whether a function is there for good and holds nothing itself, and not made by one that may be called again."""
    return (
        fn.__closure__ is None
        and not fn.__dict__
        and is_importable(fn.__globals__)
        and "<locals>" not in fn.__qualname__
    )

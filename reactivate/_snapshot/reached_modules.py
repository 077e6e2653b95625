"""Modules of a large tree: a moment of each is taken when the forward reaches it."""

from __future__ import annotations

import functools
from _thread import RLock, get_ident
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

from torch import Tensor
from torch.nn import Module

from reactivate._modules.paths import compiled_functions_of
from reactivate._setting import Rewound
from reactivate._snapshot.generators import state_of_generator, ways_of
from reactivate._snapshot.module_access import Observer, close_reaching, open_reaching, tree_of
from reactivate._snapshot.moment import Moment
from reactivate._snapshot.rewound_moment import RewoundMoment
from reactivate._snapshot.trees import LARGE_TREE, Tree, large_roots, tree_at, tree_under
from reactivate._torch.dynamo import callback_of
from reactivate._types import Unrestored


class ReachedModules:
    """The moments of the modules that a forward reaches, from now until `finish`.

    Args:
        roots: modules that are reached in any case.
        may_write_unseen: returns whether the region may write to tensors without a new version.
        unseen: calls a function so that no log of the region's ops sees what is copied here.

    Attributes:
        moments: one for each module or small tree, in the order in which they were reached; and of trees that compiled code
            may read.
        generators: (generator in an attribute, its state).
    """

    def __init__(
        self, roots: Sequence[Module], may_write_unseen: Callable[[], bool], unseen: Callable[..., Any]
    ) -> None:
        self.moments: list[Moment] = []
        self.generators: list[tuple[Any, Any]] = []
        self._may_write_unseen, self._unseen = may_write_unseen, unseen
        self._reached: dict[int, Module] = {}
        self._alone: list[Module] = []  # those reached without what is inside of them
        self._whole: set[int] = set()  # ids of those with what is inside of them
        self._compiled: dict[int, list[Module]] = {}  # by the ids of the callbacks of their compiled functions
        self._looked_at = 0  # of the modules that are reached, for compiled ones
        self._is_open = True
        self._thread, self._lock = get_ident(), RLock()
        for root in roots:
            self._reach(root)
        open_reaching(self._observer)

    @property
    def _observer(self) -> Observer:
        return Observer(self._reach, self._begin, self._reached)  # made anew, and equal: held here, it would be a cycle

    def _reach(self, module: Module) -> None:
        if id(module) in self._reached or (get_ident() != self._thread and id(module) not in self._ids_inside):
            return
        with self._lock:
            if self._is_open:
                self._unseen(self._note_from, module)

    def _note_from(self, module: Module) -> None:
        """Note a module, and those that its attributes lead to."""
        todo = [module]
        while todo:
            inner = todo.pop()
            if id(inner) not in self._reached and not self._is_noted_whole(inner):
                self._reached[id(inner)] = inner
                self._alone.append(inner)
                tree = tree_at(inner)
                todo += tree.roots
                self._note(tree)

    @functools.cached_property
    def _ids_inside(self) -> set[int]:
        """The ids of the modules inside of those reached so far: what other threads reach beside them is not the region's."""
        found: set[int] = set()
        for module in list(self._reached.values()):
            if id(module) not in found:
                found.update(map(id, tree_of(module)))
        return found

    def _begin(self, callback: Any) -> None:
        """Note what compiled code may reach: what is inside of the modules whose code it is, else of all reached so far."""
        with self._lock:
            if not self._is_open:
                return
            for module in islice(self._reached.values(), self._looked_at, None):
                for function in compiled_functions_of(module):
                    self._compiled.setdefault(id(callback_of(function)), []).append(module)
            self._looked_at = len(self._reached)
            self._unseen(self._note_inside, self._compiled.get(id(callback), self._alone))

    def _note_inside(self, modules: Sequence[Module]) -> None:
        """Note modules with all that is inside of them. Of those that were noted before, the first moment counts."""
        for module in modules:
            if id(module) not in self._whole:
                self._note_whole(tree_under((module,)))

    def _is_noted_whole(self, module: Module) -> bool:
        """Note a module with all that is inside of it, if that is little, and return whether it is noted.

        Not if a part was reached before: what it held at that time counts.
        """
        if large_roots.has(module) or not module._modules:
            return False
        tree = tree_under((module,))
        if len(tree.modules) > LARGE_TREE or not self._reached.keys().isdisjoint(map(id, tree.modules)):
            return False
        self._note_whole(tree)
        return True

    def _note_whole(self, tree: Tree) -> None:
        inside = dict(zip(map(id, tree.modules), tree.modules))
        self._reached.update(inside)
        self._whole.update(inside)
        self._note(tree)

    def _note(self, tree: Tree) -> None:
        moment = tree.moment()
        if moment is None:
            moment = Moment((), (), (), tree, self._may_write_unseen)
            moment.share(tree)
        self.moments.append(moment)
        self.generators += [(item, state_of_generator(item)) for item in tree.generators]

    def finish(self) -> None:
        """The forward is over."""
        if self._is_open:
            close_reaching(self._observer)
            with self._lock:
                self._is_open = False
            self._reached, self._alone, self._whole, self._compiled = {}, [], set(), {}
            for moment in self.moments:
                moment.finish()

    def unrestored(self) -> list[Unrestored]:
        """Return what was modified since, and of what there is no copy."""
        return [item for moment in self.moments for item in moment.unrestored()]

    def rewindings(self) -> Iterator[Any]:
        """Return the contexts in which the modules are what they were, the outermost first."""
        yield from map(RewoundMoment, reversed(self.moments))  # of a module that has several the first counts
        for generator, state in reversed(self.generators):
            yield Rewound(*ways_of(generator), state)

    def held(self) -> Iterable[Tensor]:
        """Return the copies of tensors."""
        for moment in self.moments:
            yield from moment.held()

    def name_of(self, tensor: Tensor) -> str:
        """Return how messages call a tensor of a module."""
        names = (moment.name_of(tensor) for moment in self.moments)
        return next((name for name in names if name != "a tensor of a module"), "a tensor of a module")

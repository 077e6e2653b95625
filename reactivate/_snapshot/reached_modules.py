"""Modules of a large tree: a moment of each is taken when the forward reaches it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor
from torch.nn import Module

from reactivate._modules.paths import is_compiled_module
from reactivate._setting import Rewound
from reactivate._snapshot.generators import state_of_generator, ways_of
from reactivate._snapshot.module_access import close_reaching, open_reaching, tree_of
from reactivate._snapshot.moment import Moment
from reactivate._snapshot.rewound_moment import RewoundMoment
from reactivate._snapshot.trees import LARGE_TREE, Tree, large_roots, tree_at, tree_under
from reactivate._types import Unrestored


class ReachedModules:
    """The moments of the modules that a forward reaches, from now until `finish`.

    Args:
        roots: modules that are reached in any case.
        may_write_unseen: returns whether the region may write to tensors without a new version.

    Attributes:
        moments: one for each module, in the order in which they were reached.
        generators: (generator in an attribute, its state).
    """

    def __init__(self, roots: Sequence[Module], may_write_unseen: Callable[[], bool]) -> None:
        self.moments: list[Moment] = []
        self.generators: list[tuple[Any, Any]] = []
        self._may_write_unseen = may_write_unseen
        self._reached: dict[int, Module] = {}
        self._is_open = True
        for root in roots:
            self._reach(root)
        open_reaching(self._reach)

    def _reach(self, module: Module) -> None:
        if id(module) in self._reached or not self._is_open:
            return
        todo = [module]
        while todo:
            inner = todo.pop()
            if id(inner) not in self._reached and not self._is_noted_whole(inner):
                self._reached[id(inner)] = inner
                tree, roots = tree_at(inner)
                todo += roots
                self._note(tree)
                if is_compiled_module(inner):
                    todo += tree_of(inner)  # compiled code reads what is inside past all functions

    def _is_noted_whole(self, module: Module) -> bool:
        """Note a module with all that is inside of it, if that is little, and return whether it is noted.

        Not if a part was reached before: what it held at that time counts.
        """
        if large_roots.has(module) or not module._modules:
            return False
        tree = tree_under((module,))
        inside = dict(zip(map(id, tree.modules), tree.modules))
        if len(inside) > LARGE_TREE or not self._reached.keys().isdisjoint(inside):
            return False
        self._reached.update(inside)
        self._note(tree)
        return True

    def _note(self, tree: Tree) -> None:
        self.moments.append(Moment((), (), (), tree, self._may_write_unseen))
        self.generators += [(item, state_of_generator(item)) for item in tree.generators]

    def finish(self) -> None:
        """The forward is over."""
        if self._is_open:
            self._is_open = False
            close_reaching(self._reach)
            self._reached = {}
            for moment in self.moments:
                moment.finish()

    def unrestored(self) -> list[Unrestored]:
        """Return what was modified since, and of what there is no copy."""
        return [item for moment in self.moments for item in moment.unrestored()]

    @contextmanager
    def rewound(self) -> Iterator[None]:
        """Return the context in which the modules are what they were."""
        with ExitStack() as stack:
            for moment in self.moments:
                stack.enter_context(RewoundMoment(moment))
            for generator, state in self.generators:
                stack.enter_context(Rewound(*ways_of(generator), state))
            yield

    def held(self) -> Iterable[Tensor]:
        """Return the copies of tensors."""
        for moment in self.moments:
            yield from moment.held()

    def name_of(self, tensor: Tensor) -> str:
        """Return how messages call a tensor of a module."""
        names = (moment.name_of(tensor) for moment in self.moments)
        return next((name for name in names if name != "a tensor of a module"), "a tensor of a module")

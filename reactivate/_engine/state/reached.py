"""Notes of modules that are taken as a forward reaches them, in a tree too large to be noted as a whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

from torch import Tensor
from torch.nn import Module

from reactivate._engine.state.module_changes import ModuleChanges
from reactivate._engine.state.modules import ModuleNotes
from reactivate._engine.state.reaching import close_reaching, open_reaching
from reactivate._engine.state.rewound_modules import RewoundModules
from reactivate._engine.state.streams import rewound_generator, state_of_generator
from reactivate._types import Call


class ReachedNotes:
    """The notes of each module that the forward reached, as `ModuleNotes` are of all.

    Attributes:
        parts: the notes, one for each module, in the order in which they were reached.
        generators: (generator in an attribute, its state).
    """

    def __init__(self, call: Call) -> None:
        self.parts: list[ModuleNotes] = []
        self.generators: list[tuple[Any, Any]] = []
        self._call: Call | None = call
        for root in call.roots:
            self._reach(root)
        open_reaching(self._reach)

    def _reach(self, module: Module) -> None:
        if self._call is not None:
            for found in self._call.reach(module):
                what = found.notes, found.tensors, found.parts, self._call.look_into
                self.parts.append(ModuleNotes((found.module,), *what, self._call.may_write_unseen))
                self.generators += [(item, state_of_generator(item)) for item in found.generators]

    def finish(self) -> None:
        """The forward is over."""
        if self._call is not None:
            self._call = None
            close_reaching(self._reach)
            for part in self.parts:
                part.finish()

    def written_parameters(self) -> list[tuple[Tensor, int]]:
        """Return (parameter, noted version) of those that have another version by now, and no shadow."""
        return [item for part in self.parts for item in part.written_parameters()]

    def unknown_gradients(self) -> Sequence[tuple[Tensor, int]]:
        """Return the gradients that the forward moved, and of which there is no copy, with their versions."""
        return [item for part in self.parts for item in part.unknown_gradients()]

    @contextmanager
    def _rewound(self, takes_turns: bool) -> Iterator[None]:
        with ExitStack() as stack:
            for part in self.parts:
                stack.enter_context(RewoundModules(part, takes_turns=takes_turns))
            for generator, state in self.generators:
                stack.enter_context(rewound_generator(generator, state))
            yield

    def rewound(self, *, takes_turns: bool = True) -> AbstractContextManager[None]:
        """Return the context in which the modules are what they were."""
        return self._rewound(takes_turns)

    def changes(self) -> Callable[[], AbstractContextManager[Any]]:
        """Return what brings the modules to where they are now, and a context to do so in."""
        changes = [ModuleChanges(part) for part in self.parts]

        def bring() -> AbstractContextManager[Any]:
            stack = ExitStack()
            for change in changes:
                stack.enter_context(change.bring() or nullcontext())
            return stack

        return bring

    def name_of(self, tensor: Tensor) -> str:
        """Return how messages call a tensor of a module."""
        names = (part.name_of(tensor) for part in self.parts)
        return next((name for name in names if name != "a tensor of a module"), "a tensor of a module")

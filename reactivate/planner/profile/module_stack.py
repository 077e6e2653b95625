"""The modules whose calls run, so that what they allocate can be named."""

from __future__ import annotations

from torch.nn import Module


class ModuleStack:
    """The modules of a model whose calls run, outermost first.

    Args:
        model: the model; None for one whose modules need no names.
    """

    def __init__(self, model: Module | None) -> None:
        self._paths = {} if model is None else {id(module): path for path, module in model.named_modules()}
        self._running: list[int] = []

    @property
    def innermost(self) -> str:
        """Return the path of the module that was called last and still runs; empty where there is none."""
        return self._paths[self._running[-1]] if self._running else ""

    def begins(self, module: Module) -> None:
        """A module is called."""
        if id(module) in self._paths:
            self._running.append(id(module))

    def ends(self, module: Module) -> None:
        """A module has returned, or raised; so have those that it called, even if nobody said so."""
        if id(module) in self._running:
            while self._running.pop() != id(module):
                pass

"""The modules whose calls run, so that what they allocate can be named."""

from __future__ import annotations

from bisect import bisect_right

from torch.nn import Module


class ModuleStack:
    """The modules of a model whose calls run, outermost first.

    Args:
        model: the model; None for one whose modules need no names.
    """

    def __init__(self, model: Module | None) -> None:
        self._paths = {} if model is None else {id(module): path for path, module in model.named_modules()}
        self._running: list[int] = []
        self._starts: list[int] = []  # the numbers of autograd's nodes from which on another module made them
        self._makers: list[str] = []

    @property
    def outer(self) -> str:
        """Return the path of the module in whose call the innermost one is; empty where there is none."""
        return self._paths[self._running[-2]] if len(self._running) > 1 else ""

    def path_of(self, module: Module) -> str | None:
        """Return the path of a module; None if it is none of the model's."""
        return self._paths.get(id(module))

    def mark(self, node: int) -> None:
        """From this node on the innermost module makes those of the graph."""
        self._starts.append(node)
        self._makers.append(self.innermost)

    def maker_of(self, node: int) -> str:
        """Return the path of the module that made a node of the graph."""
        place = bisect_right(self._starts, node)
        return self._makers[place - 1] if place else ""

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

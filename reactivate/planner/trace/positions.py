"""The position of a step in its model: the modules whose calls run, and the call of a unit that an op belongs to."""

from __future__ import annotations

from bisect import bisect_right

import torch
from torch.nn import Module

from reactivate._passes.current import is_recomputed
from reactivate._torch.autograd import current_node_number, next_node_number
from reactivate.planner.trace.records import UnitCall


def is_in_backward() -> bool:
    """Return whether what runs is no pass over the model, but a backward, with the forwards that checkpoints repeat in it."""
    return is_recomputed() or current_node_number() is not None


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
        """A module has returned, or raised; so have those that it called."""
        if id(module) in self._running:
            while self._running.pop() != id(module):
                pass


class UnitPosition:
    """The position of the step in the model.

    Attributes:
        calls: of the units, in order, for each pass over the model.
    """

    def __init__(self) -> None:
        self.calls: list[list[UnitCall]] = []
        self._turn = 0
        self._is_backward = False
        self._starts: list[int] = []  # of each call of a unit in this turn: the number of the first node made in it
        self._stops: list[int] = []
        self._depth = 0
        self._last = 0

    def unit_begins(self, path: str, live_bytes: int = 0, op: int = 0) -> UnitCall | None:
        """Return the call of a unit that begins; None for one in another unit: in a call of itself, say.

        Args:
            path: of the unit.
            live_bytes, op: see `UnitCall`.
        """
        self._depth += 1
        if self._depth > 1:
            return None
        if self._is_backward:  # the next pass
            self._is_backward = False
            self._turn += 1
            self._starts, self._stops = [], []
        self._starts.append(next_node_number())
        while len(self.calls) <= self._turn:
            self.calls.append([])
        call = UnitCall(path, live_bytes, has_gradients=torch.is_grad_enabled(), op=op)
        self.calls[self._turn].append(call)
        return call

    def unit_ends(self) -> bool:
        """Return whether it was in no other unit."""
        self._depth -= 1
        if self._depth == 0:
            self._stops.append(next_node_number())
        return self._depth == 0

    def now(self) -> tuple[int, int, bool]:
        """The turn, the position, and whether it is the backward."""
        number = current_node_number()
        if number is None:
            begun, ended = len(self._starts), len(self._stops)
            position = 2 * begun - 1 if begun > ended else 2 * ended
            return self._turn, position, False
        self._is_backward = True
        if number >= 0:  # an accumulation of a gradient goes with the node before
            ended = bisect_right(self._stops, number)
            is_inside = ended < len(self._starts) and self._starts[ended] <= number
            self._last = 2 * ended + 1 if is_inside else 2 * ended
        return self._turn, self._last, True

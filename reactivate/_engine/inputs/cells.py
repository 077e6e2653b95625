"""Closed-over tensors with a gradient."""

from __future__ import annotations

from types import CellType
from typing import Any

from torch import Tensor

from reactivate._engine.inputs.specs import rebuild
from reactivate._engine.state.functions import CellNote


class CellTensorNote(CellNote):
    """A closed-over tensor with a gradient, kept as autograd keeps an input."""

    __slots__ = ("_tensor", "spec")

    def __init__(self, target: CellType, spec: Any) -> None:
        self.spec = spec
        self._tensor: Tensor | None = None
        super().__init__(target)

    def contents(self, weak: bool | None = True) -> Any:
        return CellNote.contents(self, weak) if weak is None else self.spec

    def prepare(self, memo: dict[int, Any]) -> None:
        """Get the tensor, as long as everything is as it is: a region around this one may have to be recomputed."""
        self._tensor = rebuild(self.spec, memo)

    def is_at(self, contents: Any) -> bool:
        return CellNote.is_at(self, self._tensor if contents is self.spec else contents)

    def put(self, contents: Any) -> None:
        CellNote.put(self, self._tensor if contents is self.spec else contents)

    def let_go(self) -> None:
        """Forget the tensor of one recomputation."""
        self._tensor = None

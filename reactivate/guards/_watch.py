"""Whether a replay reads what was written to: only then there is something to refuse (Rule 15).

A function may reach more than it reads: a bound method reaches its whole model, of which an optimizer may step a part
before this backward. Which part a replay reads shows when it runs. So where something was written to, its ops are watched;
mostly nothing was, and nobody watches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from reactivate.errors import MutationError


class WatchedReads(TorchDispatchMode):
    """Refuses every op that reads one of `written`.

    Args:
        written: tensors that a replay must not read.
        refuse: makes the error for one of them.

    Raises:
        MutationError: from the op; and from the end of the context, if the function has swallowed it.
    """

    def __init__(self, written: Iterable[Tensor], refuse: Callable[[Tensor], MutationError]) -> None:
        super().__init__()
        self._written = {id(tensor): tensor for tensor in written}
        self._refuse = refuse
        self._refused: MutationError | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._look_at((args, kwargs))
        return func(*args, **(kwargs or {}))

    def _look_at(self, value: Any) -> None:
        if isinstance(value, Tensor):
            if id(value) in self._written:
                self._refused = self._refuse(value)
                raise self._refused
        elif isinstance(value, (tuple, list)):
            for item in value:
                self._look_at(item)
        elif isinstance(value, dict):
            self._look_at(list(value.values()))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, traceback)
        if self._refused is not None and error is not self._refused:
            raise self._refused

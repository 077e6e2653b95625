"""Modes that write down which ops run, and which functions of torch are called."""

from __future__ import annotations

from collections import Counter
from typing import Any

from journal import Journal
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode


class CountOps(TorchDispatchMode):
    """Counts what runs inside of it, by the name of the op."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


class Seen(TorchFunctionMode):
    """Lists the names of the functions of torch that are called inside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.names = Journal()  # also of those in recomputations, after which a list is as it was

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))

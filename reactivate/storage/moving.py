"""Storages that move tensors: the part of them that users see."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import fields
from typing import Any, ClassVar

from torch import Tensor

from reactivate._text.sizes import count, size
from reactivate.storage.moved import Mover, Traffic

_CHECKS: dict[str, Callable[[Any, str], int]] = {"limit": size, "least_bytes": size, "last": count, "ahead": count}


class Moving:
    """A frozen dataclass whose fields are settings, and whose `_mover` does the work.

    Copies and pickles are made anew from the settings.
    """

    __dataclass_fields__: ClassVar[dict[str, Any]]
    shares_views = True
    _mover: Mover

    def save(self, tensor: Tensor) -> Any:
        return self._mover.save(tensor)

    def load(self, handle: Any) -> Tensor:
        return self._mover.load(handle)

    @property
    def traffic(self) -> Traffic:
        """Counts of the tensors that were moved so far, and of those that stayed, with the reasons."""
        return self._mover.traffic

    def group(self, key: Any) -> AbstractContextManager[None]:
        """Take what is kept inside of the context as one series, which a backward reads from its end to its beginning.

        For several forwards before the first backward, as in a pipeline: a group for each microbatch.

        Args:
            key: which group; anything that can be hashed.
        """
        return self._mover.order.group(key)

    def prefetch(self, key: Any) -> None:
        """Start to bring back what the backward of the group `key` reads first."""
        self._mover.prefetch_last(key)

    def _checked(self) -> tuple[int | None, int, int, int]:
        """Return limit, least bytes, last and ahead as numbers, which the fields are from now on.

        Raises:
            UsageError: one is none.
        """
        kind, found = type(self).__name__, {}
        for name, check in _CHECKS.items():
            value = getattr(self, name)
            found[name] = None if value is None and name == "limit" else check(value, f"{kind}({name}=...)")
            object.__setattr__(self, name, found[name])
        return tuple(found.values())  # type: ignore[return-value]

    def __reduce__(self) -> Any:
        return _made, (type(self), {item.name: getattr(self, item.name) for item in fields(self) if item.init})

    def __deepcopy__(self, memo: Any) -> Any:
        made, arguments = self.__reduce__()
        return made(*arguments)


def _made(kind: Any, settings: dict[str, Any]) -> Any:
    return kind(**settings)

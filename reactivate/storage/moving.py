"""Storages that move tensors: the part of them that users see."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import fields
from typing import Any, ClassVar

from torch import Tensor

from reactivate.storage.moved import Mover, Traffic


class Moving:
    """A frozen dataclass whose fields are settings, and whose `_mover` does the work.

    Copies and pickles are made anew from the settings.
    """

    __dataclass_fields__: ClassVar[dict[str, Any]]
    exact = True
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

    def __reduce__(self) -> Any:
        return _made, (type(self), {item.name: getattr(self, item.name) for item in fields(self) if item.init})

    def __deepcopy__(self, memo: Any) -> Any:
        made, arguments = self.__reduce__()
        return made(*arguments)


def _made(kind: Any, settings: dict[str, Any]) -> Any:
    return kind(**settings)

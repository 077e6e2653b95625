"""The ranks that plan one step together.

Each rank plans with its own figures, and all of them take the same turns: what they decide together they exchange first, and
decide from the same numbers. An error on one rank reaches the others in the place of the next number, so that all raise.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch.distributed as dist

from reactivate.errors import UsageError

Value = TypeVar("Value")


class Ranks:
    """The ranks of a process group, or this one alone.

    Args:
        group: the group; None: nobody else.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self._are_told = group is None  # that one of them has failed

    @property
    def is_alone(self) -> bool:
        """Return whether there is nobody to agree with."""
        return self._group is None

    @property
    def number(self) -> int:
        """Return the number of this one, from 0 on."""
        return 0 if self._group is None else dist.get_rank(self._group)

    def gather(self, value: Value) -> list[Value]:
        """Return the values of all ranks, in their order. Every rank must come to this call.

        Raises:
            UsageError: another rank has failed.
        """
        if self._group is None:
            return [value]
        found = self._exchanged(("value", value))
        errors = {rank: text for rank, (kind, text) in enumerate(found) if kind == "error"}
        if errors:
            self._are_told = True
            rank, text = next(iter(errors.items()))
            raise UsageError(f"plan: rank {rank} of the {len(found)} that plan together raised {text}")
        return [item for _, item in found]

    def check_same(self, name: str, value: Any) -> None:
        """See to it that all ranks have the same value.

        Raises:
            UsageError: they do not.
        """
        found = self.gather(value)
        other = next((rank for rank, item in enumerate(found) if item != found[0]), None)
        if other is None:
            return
        self._are_told = True
        raise UsageError(
            f"plan: {name} of rank {other} differs from that of rank 0: {_difference(found[other], found[0])}. All ranks of "
            "group= need the same plan, so they must plan the same model in the same way."
        )

    @contextmanager
    def together(self) -> Iterator[None]:
        """Inside, an error on one rank is one on all of them: at their next exchange, or within the timeout of the group."""
        try:
            yield
            self.gather(None)
        except BaseException as error:
            if not self._are_told:
                self._tell(error)
            raise

    def _tell(self, error: BaseException) -> None:
        self._are_told = True
        try:
            self._exchanged(("error", f"{type(error).__name__}: {error}"))
        except RuntimeError:  # the others are gone: this rank's own error is the one to see
            return

    def _exchanged(self, item: tuple[str, Any]) -> list[tuple[str, Any]]:
        found: list[Any] = [None] * dist.get_world_size(self._group)
        try:
            dist.all_gather_object(found, item, group=self._group)
        except BaseException:
            self._are_told = True
            raise
        return found


def _difference(one: Any, other: Any) -> str:
    if isinstance(one, list) and isinstance(other, list):
        if len(one) != len(other):
            return f"{len(one)} for {len(other)}"
        return next(_difference(mine, its) for mine, its in zip(one, other) if mine != its)
    return f"{one!r} for {other!r}"

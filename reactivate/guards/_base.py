"""A guard set."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from reactivate._types import Guard
from reactivate.errors import UsageError


@dataclass(frozen=True, repr=False)
class Guards:
    """Guards in the order in which they enter a recomputation.

    Args:
        members: the guards.

    Examples:
        >>> import reactivate
        >>> fast = reactivate.guards.DEFAULT.without("rng")  # for a function that draws no random number
        >>> len(fast) < len(reactivate.guards.DEFAULT)
        True
    """

    members: tuple[Guard, ...] = ()

    def __repr__(self) -> str:
        return f"Guards({', '.join(self.names())})"

    def __iter__(self) -> Iterator[Guard]:
        return iter(self.members)

    def __len__(self) -> int:
        return len(self.members)

    def names(self) -> tuple[str, ...]:
        """The names that `without` knows."""
        return tuple(dict.fromkeys(guard.name for guard in self.members))

    def without(self, *names: str) -> Guards:
        """These guards but those with one of `names`.

        Raises:
            UsageError: no guard has that name.
        """
        for name in names:
            if name not in self.names():
                raise UsageError(f"No guard is called {name!r}. There are: {', '.join(self.names())}.")
        return Guards(tuple(guard for guard in self.members if guard.name not in names))

    def adding(self, *guards: Guard) -> Guards:
        """These guards, and `guards` inside of them."""
        return Guards((*self.members, *guards))

"""Every error that reactivate raises.

::

    ReactivateError (RuntimeError)
    |-- MutationError           what a recomputation must read was changed after the forward pass read it
    |-- RecomputeMismatchError (torch's CheckpointError)  the recomputation did not do what the forward pass did
    |-- PlanInfeasible          no policy lets the step fit in the budget
    |-- StorageError            a storage cannot give back a tensor that it took in
    |-- UsageError (ValueError)  the request itself is wrong: an unknown option, a bad value
    `-- UnsupportedError (NotImplementedError)  a part of torch that cannot be checkpointed

All of them say what was asked, what was found, where, and what to do about it.
"""

from __future__ import annotations

from typing import Any

from torch.utils.checkpoint import CheckpointError

__all__ = [
    "MutationError",
    "PlanInfeasible",
    "ReactivateError",
    "RecomputeMismatchError",
    "StorageError",
    "UnsupportedError",
    "UsageError",
]
__dir__ = __all__.copy


class ReactivateError(RuntimeError):
    """The root of every error that reactivate raises."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle it with its attributes: an error may come out of another process."""
        return _rebuilt, (type(self), self.args, vars(self))


def _rebuilt(kind: type[ReactivateError], args: tuple[Any, ...], attributes: dict[str, Any]) -> ReactivateError:
    error = kind.__new__(kind, *args)
    vars(error).update(attributes)
    return error


class MutationError(ReactivateError):
    """Something that a recomputation must read was changed after the forward pass read it (Rule 15)."""


class RecomputeMismatchError(ReactivateError, CheckpointError):
    """A recomputation did something else than the forward pass (Rule 16). It is torch's own error for this, too.

    Attributes:
        kind: "fewer" or "more" tensors were saved, or some with other "metadata", or an op had other "values".
    """

    def __init__(self, message: str, *, kind: str) -> None:
        super().__init__(message)
        self.kind = kind


class PlanInfeasible(ReactivateError):
    """No policy lets the step fit in the budget.

    Attributes:
        budget_bytes: what was allowed.
        least_bytes: the least budget for which there is a plan; where what is there all the time is larger than the device
            already, that.
    """

    def __init__(self, message: str, *, budget_bytes: int, least_bytes: int) -> None:
        super().__init__(message)
        self.budget_bytes = budget_bytes
        self.least_bytes = least_bytes


class StorageError(ReactivateError):
    """A storage cannot give back a tensor that it took in: its place fails, or was changed."""


class UsageError(ReactivateError, ValueError):
    """An option, a name or a value that reactivate does not know (Rule 17)."""


class UnsupportedError(ReactivateError, NotImplementedError):
    """A feature of torch that a region cannot be combined with, refused by name (Rule 5)."""

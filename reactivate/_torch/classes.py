"""Classes of tensors: those that only have a Python name for plain ones, and those that are something else."""

from __future__ import annotations

from torch import Tensor


def has_memory(kind: type[Tensor]) -> bool:
    """Return whether tensors of a class have memory of their own, as plain ones have.

    Those that are made of others do not, and neither do fake ones.
    """
    return kind.__torch_dispatch__ is Tensor.__torch_dispatch__

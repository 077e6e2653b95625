"""Tensors without memory (`explain(fake=True)`): torch has no public name for them."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from reactivate._torch.ways import fastest, find

FakeTensor, FakeTensorMode = find("torch._subclasses.FakeTensor"), find("torch._subclasses.FakeTensorMode")

# What fake tensors raise where the numbers in a tensor decide, and not only because they cannot run an op.
NEEDS_NUMBERS = (
    find("torch._subclasses.fake_tensor.DataDependentOutputException"),
    find("torch._subclasses.fake_tensor.DynamicOutputShapeException"),
)

# What AOTAutograd calls a function with, to trace it.
STAND_INS = FakeTensor, find("torch._subclasses.functional_tensor.FunctionalTensor")

# What runs with no fake tensor among its arguments can run for real: the fake mode is put aside for the time.
unset_fake_temporarily = find("torch._subclasses.fake_tensor.unset_fake_temporarily")


class _Noticing(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} was noticed")


def _hides(without_dispatch: Any) -> bool:
    with _Noticing(), without_dispatch():
        made = torch.empty_strided((2, 3), (1, 2), device="meta")
    return type(made) is Tensor and made.stride() == (1, 2)


# What runs inside goes to kernels at once: no dispatch mode and no tensor's own `__torch_dispatch__` sees it.
without_dispatch: Any = fastest(
    "making tensors beside fake ones",
    "torch._C._DisableTorchDispatch",
    probe=_hides,
    public=_disable_current_modes,
)


def device_of(fake: Any) -> torch.device:
    """Return the device that a fake tensor gives as its own: torch asks several times an op, through every mode."""
    return torch.device("meta") if fake.fake_mode.in_kernel_invocation else fake.fake_device  # type: ignore[no-any-return]


_TORCH = f"{Path(torch.__file__).parent}{os.sep}"
_OF_CPP = (RuntimeError, NotImplementedError)


def lacks_values(error: BaseException) -> bool:
    """Return whether torch has raised an error, as it does where a fake tensor has no values or an op no kernel for it.

    It has classes of its own for most of these. The others are plain errors of its C++, or come out of its Python, where a
    tensor is written as a text, say. An error that other code has raised has another reason: in the user's, in ours.
    """
    kind = type(error)
    if issubclass(kind, torch.OutOfMemoryError):
        return False
    return kind in _OF_CPP or kind.__module__.startswith("torch.") or _is_raised_in_torch(error)


def _is_raised_in_torch(error: BaseException) -> bool:
    where = error.__traceback__
    while where is not None and where.tb_next is not None:
        where = where.tb_next
    return where is not None and where.tb_frame.f_code.co_filename.startswith(_TORCH)


_LOGGER = logging.getLogger("torch._subclasses.fake_tensor")


@contextmanager
def unlogged() -> Iterator[None]:
    """torch does not log the ops that fake tensors cannot run: the caller has another way to run them."""
    before = _LOGGER.level
    _LOGGER.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        _LOGGER.setLevel(before)

"""Exceptions that leave a backward pass on the simulated accelerator."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

_error = (ctypes.c_void_p * 3)()
_error_places = tuple(ctypes.cast(ctypes.addressof(_error) + 8 * index, ctypes.c_void_p) for index in range(3))
_fetch, _normalize = ctypes.pythonapi.PyErr_Fetch, ctypes.pythonapi.PyErr_NormalizeException
_caught: list[BaseException] = []


class Guard(torch._C._acc.DeviceGuard):
    """torch asks it for the type of device also while an exception of a hook leaves a backward pass.

    Python ends the process if a function returns with an exception set: this one puts it aside for `run_backward`.
    """

    def type_(self) -> Any:
        _fetch(*_error_places)
        if _error[0]:
            _normalize(*_error_places)
            found = ctypes.cast(_error[1], ctypes.py_object).value
            _caught.append(found.with_traceback(ctypes.cast(_error[2], ctypes.py_object).value if _error[2] else None))
        return torch._C._autograd.DeviceType.PrivateUse1


engine_run_backward = torch.autograd._engine_run_backward


def run_backward(*args: Any, **kwargs: Any) -> Any:
    _caught.clear()
    try:
        return engine_run_backward(*args, **kwargs)
    except SystemError:
        if _caught:
            raise _caught[0] from None
        raise

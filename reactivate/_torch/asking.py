"""Which function of torch's it is that a function mode is told of.

A function of torch's tells a mode of itself by its name, and finds by that name what stands there now: perhaps a patch, which
calls it. A mode that called the patch would do once more, inside of it, what the patch does.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    FrameType,
    FunctionType,
    MethodDescriptorType,
    MethodWrapperType,
    WrapperDescriptorType,
)
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import handle_torch_function, has_torch_function

from reactivate._torch.modes import function_modes, replace_function_modes

IN_C = frozenset({BuiltinFunctionType, MethodDescriptorType, MethodWrapperType, WrapperDescriptorType})
"""The classes of functions that are written in C."""

_TELLS = handle_torch_function.__code__
_FORGOTTEN = {
    functional.l1_loss: "weight",
    Tensor.dim_order: "ambiguity_check",
    torch.autograd.backward: "grad_variables",
}
"""The argument that a function does not hand to modes."""


def asking(func: Any, kwargs: dict[str, Any] | None) -> Any:
    """Return the function that asks the mode that calls this: it is `func`, unless a patch has its name.

    Args:
        func: the function that the mode is told of.
        kwargs: what it is told the function is called with. What is forgotten there is put in.
    """
    if type(func) in IN_C:
        return func
    caller: Any = sys._getframe(2)
    func = _running(func, caller)
    if func in _FORGOTTEN:
        name, given = _FORGOTTEN[func], caller.f_back.f_locals
        if name in given and kwargs is not None:
            kwargs[name] = given[name]
    return func


def _running(func: Any, caller: FrameType) -> Any:
    """Return the function that asks a mode by a frame, told of `func`."""
    if caller.f_code is not _TELLS:  # a method in C
        return func if is_torchs_function(func) or _is_torchs_object(func) else _method(func)
    asks: Any = caller.f_back
    code = asks.f_code
    if (type(func) is FunctionType and func.__code__ is code) or _is_torchs_object(func):
        return func
    names = asks.f_globals
    if not _is_torchs(names):  # a function of the user's own may let another one ask for it
        return func
    # So do some of torch's.
    is_its_part = is_torchs_function(func) and getattr(names.get(code.co_name), "__code__", None) is code
    return func if is_its_part else _function_of(code, asks)


def _is_torchs_object(func: Any) -> bool:
    return type(func).__module__.partition(".")[0] == "torch"  # an op


def is_torchs_function(function: Any) -> bool:
    """Return whether a function is written in Python, in a module of torch's."""
    return type(function) is FunctionType and _is_torchs(function.__globals__)


def _is_torchs(names: dict[str, Any]) -> bool:
    return str(names.get("__name__")).partition(".")[0] == "torch"


def _method(patch: Any) -> Any:
    """Return the method of tensors in whose place a patch stands."""
    name = next((name for name in vars(Tensor) if getattr(Tensor, name, None) == patch), "")
    return getattr(super(Tensor, Tensor), name, patch)


def _function_of(code: CodeType, frame: FrameType) -> FunctionType:
    """Return the function that runs in a frame: as it was found at first, or one like it, if it was patched before."""
    known = _found.get((code, tuple(map(frame.f_locals.get, code.co_freevars))))
    return _made_of(code, frame) if known is None else known


def _made_of(code: CodeType, frame: FrameType) -> FunctionType:
    closure = tuple(CellType(frame.f_locals[name]) for name in code.co_freevars)
    made = FunctionType(code, frame.f_globals, code.co_name, None, closure)  # it is given all arguments
    if not closure:
        _found[code, ()] = made
    return made


def _contents_of(fn: FunctionType) -> tuple[Any, ...]:
    return tuple(cell.cell_contents for cell in fn.__closure__ or ())


_found: dict[tuple[CodeType, tuple[Any, ...]], FunctionType] = {
    (fn.__code__, _contents_of(fn)): fn
    for space in (torch.functional, functional, Tensor)
    for fn in vars(space).values()
    if is_torchs_function(fn) and all(isinstance(item, Hashable) for item in _contents_of(fn))
}
"""Torch's functions that are written in Python, by their code and what they close over."""


def show_inside(mode: Any, function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Call a function of torch's that is written in Python, and let a mode see the functions that it calls.

    Args:
        mode: the mode, which is told of the function now.
    """
    around = function_modes()
    if not around:
        if has_torch_function((*args, *kwargs.values())):  # a subclass of tensors is told of the whole
            return function(*args, **kwargs)
        with mode:
            return _unasked(function)(*args, **kwargs)
    replace_function_modes((mode, *around))  # other modes are told of the function first, and the last one tells it
    try:
        return function(*args, **kwargs)
    finally:
        replace_function_modes(around)


def _unasked(function: Any) -> FunctionType:
    """Return a function that does not ask whether a mode wants all of it. Its names are those of now: they may be patched."""
    names = {**function.__globals__, "has_torch_function": lambda tensors: False}
    copied = FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied

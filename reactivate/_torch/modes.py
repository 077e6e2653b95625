"""Function and dispatch modes, and looks at tensors that none of them sees."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from reactivate._torch.ways import fastest


class _Mode(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class _DispatchMode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def _is_stack(count: Any, at: Any, push: Any, pop: Any, is_any: Any, disabled: Any) -> bool:
    before, mode = count(), _Mode()
    push(mode)
    try:
        is_there = count() == before + 1 and at(before) is mode and is_any()
        with disabled():
            is_hidden = not is_any()
    finally:
        popped = pop()
    return is_there and is_hidden and popped is mode and count() == before


push_function_mode: Callable[[Any], None]
pop_function_mode: Callable[[], Any]
is_function_mode_active: Callable[[], bool]
without_function_modes: Any  # the engine's own looks at tensors are not the user's ops
(
    _count_function_modes,
    _function_mode_at,
    push_function_mode,
    pop_function_mode,
    is_function_mode_active,
    without_function_modes,
) = fastest(
    "the stack of function modes",
    "torch._C._len_torch_function_stack",
    "torch._C._get_function_stack_at",
    "torch._C._push_on_torch_function_stack",
    "torch._C._pop_torch_function_stack",
    "torch._C._is_torch_function_mode_enabled",
    "torch._C.DisableTorchFunction",
    probe=_is_stack,
    lost="every region",
)


def _is_dispatch_stack(count: Any, at: Any, push: Any, pop: Any) -> bool:
    before, mode = count(), _DispatchMode()
    push(mode)
    try:
        is_there = count() == before + 1 and at(before) is mode
    finally:
        popped = pop(None)
    return is_there and popped is mode and count() == before


is_dispatch_mode_active: Callable[[], int]
is_dispatch_mode_active, _dispatch_mode_at, _push_dispatch_mode, _pop_dispatch_mode = fastest(
    "the stack of dispatch modes",
    "torch._C._len_torch_dispatch_stack",
    "torch._C._get_dispatch_stack_at",
    "torch._C._push_on_torch_dispatch_stack",
    "torch._C._pop_torch_dispatch_stack",
    probe=_is_dispatch_stack,
    lost="every region",
)


def function_modes() -> tuple[Any, ...]:
    """The active `TorchFunctionMode`s, outermost first."""
    return tuple(map(_function_mode_at, range(_count_function_modes())))


def replace_function_modes(modes: tuple[Any, ...]) -> None:
    """Make `modes` the active ones. Their `__enter__` is not called: they were entered before."""
    for _ in range(_count_function_modes()):
        pop_function_mode()
    for mode in modes:
        push_function_mode(mode)


def dispatch_modes() -> tuple[Any, ...]:
    """The active `TorchDispatchMode`s but torch's machinery (fake tensors, tracing), outermost first."""
    modes = map(_dispatch_mode_at, range(is_dispatch_mode_active()))
    return tuple(mode for mode in modes if getattr(mode, "_mode_key", None) is None)


def replace_dispatch_modes(modes: tuple[Any, ...]) -> None:
    """Make `modes` the active ones beside torch's machinery. Their `__enter__` is not called."""
    for _ in dispatch_modes():
        _pop_dispatch_mode(None)
    for mode in modes:
        _push_dispatch_mode(mode)


def is_tracing() -> bool:
    """Return whether ops are traced, and not run."""
    keys = torch._C._TorchDispatchModeKey
    return any(map(torch._C._get_dispatch_mode, (keys.FAKE, keys.PROXY, keys.FUNCTIONAL)))


def is_aot_tracing() -> bool:
    """Return whether AOTAutograd calls Python to trace it, with tensors that stand for no values."""
    if not is_dispatch_mode_active():
        return False
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FUNCTIONAL) is not None


# -- looks that none of them sees -------------------------------------------------------------------------------------


def copy_unseen(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that neither autograd nor modes of the user's notice."""
    if not is_dispatch_mode_active() and not _count_function_modes():
        return (tensor.detach() if tensor.requires_grad else tensor).clone()
    with without_function_modes():
        if type(tensor) is not torch.Tensor or torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY):
            return tensor.detach().clone()
        with _disable_current_modes():
            return tensor.detach().clone()


def run_unseen(function: Callable[..., Any], *args: Any) -> Any:
    """`function(*args)`, which neither modes of the user's nor torch's selective checkpointing notice."""
    if not is_dispatch_mode_active() and not _count_function_modes():
        return function(*args)
    with without_function_modes(), _disable_current_modes():
        return function(*args)


def equal_unseen(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Compare tensors unseen by the user's modes and by a fake-tensor mode, which could not say."""
    if not is_dispatch_mode_active() and not _count_function_modes():
        return torch.equal(one, other)
    return run_unseen(torch.equal, one, other)


def is_same_state(one: Any, other: Any) -> bool:
    """Compare states of a generator: tensors unseen, anything else as it compares itself."""
    return equal_unseen(one, other) if isinstance(one, torch.Tensor) else bool(one == other)


def _copies(copy: Any) -> bool:
    x = torch.zeros(2, device="cpu")
    copy([x], [torch.ones(2, device="cpu")])
    return bool(x.sum() == 2)


def _copy_each(targets: Any, sources: Any) -> None:
    for target, source in zip(targets, sources):
        target.copy_(source)


# Many tensors copied into others with one call; `torch.Tensor.copy_` costs a call of Python's for each.
copy_all: Callable[..., None] = fastest(
    "copying many tensors in one call", "torch._foreach_copy_", probe=_copies, public=_copy_each
)

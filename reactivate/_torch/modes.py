"""Modes: function and dispatch modes, fake tensors, and transforms of `torch.func`."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from reactivate._setting import Rewound
from reactivate._torch.private_api import find, resolve_private

# -- stacks of modes --------------------------------------------------------------------------------------------------

push_function_mode: Callable[[Any], None]
pop_function_mode: Callable[[], Any]
_count_function_modes, _function_mode_at, push_function_mode, pop_function_mode = resolve_private(
    "the stack of function modes",
    "torch._C._len_torch_function_stack",
    "torch._C._get_function_stack_at",
    "torch._C._push_on_torch_function_stack",
    "torch._C._pop_torch_function_stack",
    lost="every region",
)
is_function_mode_active: Callable[[], bool]
without_function_modes: Any  # the engine's own looks at tensors are not the user's ops
is_function_mode_active, without_function_modes = resolve_private(
    "looks at tensors that no function mode sees",
    "torch._C._is_torch_function_mode_enabled",
    "torch._C.DisableTorchFunction",
    lost="every region",
)
# `is_profiling` says so, too, where that cannot be told.
is_profiler_running: Callable[[], bool] = resolve_private(
    "telling a profiler around a plan from none",
    "torch.autograd._profiler_enabled",
    probe=lambda ask: ask() in (True, False),
    without=lambda: False,
    lost="the refusal to plan inside of a profiler, which a plan ends",
)
is_dispatch_mode_active: Callable[[], int]
is_dispatch_mode_active, _dispatch_mode_at, _push_dispatch_mode, _pop_dispatch_mode = resolve_private(
    "the stack of dispatch modes",
    "torch._C._len_torch_dispatch_stack",
    "torch._C._get_dispatch_stack_at",
    "torch._C._push_on_torch_dispatch_stack",
    "torch._C._pop_torch_dispatch_stack",
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


def leave_dispatch_modes(count: int) -> None:
    """Exit the innermost dispatch modes until `count` are active: torch has flags beside the stack, which an exit sets."""
    while is_dispatch_mode_active() > count:
        mode = _dispatch_mode_at(is_dispatch_mode_active() - 1)
        if getattr(mode, "old_dispatch_mode_flags", None):
            TorchDispatchMode.__exit__(mode, None, None, None)
        else:  # it was not entered by its `__enter__`
            _pop_dispatch_mode(None)


_KEYS, _machinery = find("torch._C._TorchDispatchModeKey"), find("torch._C._get_dispatch_mode")


def is_tracing() -> bool:
    """Return whether ops are traced, and not run."""
    return any(map(_machinery, (_KEYS.FAKE, _KEYS.PROXY, _KEYS.FUNCTIONAL)))


def is_aot_tracing() -> bool:
    """Return whether AOTAutograd calls Python to trace it, with tensors that stand for no values."""
    return bool(is_dispatch_mode_active()) and _machinery(_KEYS.FUNCTIONAL) is not None


# The innermost torch.func transform around the call, or None.
current_transform: Callable[[], Any] = resolve_private(
    "detecting torch.func transforms around a call",
    "torch._C._functorch.peek_interpreter_stack",
    probe=lambda ask: ask() is ask(),
    without=lambda: None,
    lost="regions under torch.func raise torch's own error about hooks",
)
_TRANSFORMS = {"Grad": "torch.func.grad or vjp", "Jvp": "torch.func.jvp", "Vmap": "torch.func.vmap"}


def name_of_transform() -> str | None:
    """Return the name of the innermost transform; None for functionalization, which is not the user's."""
    return _TRANSFORMS.get(current_transform().key().name)


_is_key_included, _key_of, _begin_batched, _end_batched, _pop_transform, _push_transform = resolve_private(
    "leaving what a batched backward runs in",
    "torch._C._dispatch_tls_is_dispatch_key_included",
    "torch._C._dispatch_key_parse",
    "torch._C._vmapmode_increment_nesting",
    "torch._C._vmapmode_decrement_nesting",
    "torch._C._functorch.pop_dynamic_layer_stack",
    "torch._C._functorch.push_dynamic_layer_stack",
    without=(lambda key: False, str, *[None] * 4),
    lost="a batched backward through a region that draws random numbers raises vmap's error",
)


_VMAP_MODE = _key_of("VmapMode")


def is_batched() -> bool:
    """Return whether a backward runs in a `vmap` or another transform: no forward of a region does."""
    if _is_key_included(_VMAP_MODE):
        return True
    return current_transform() is not None and name_of_transform() is not None and _pop_transform is not None


@contextmanager
def unbatched() -> Iterator[None]:
    """Be outside of all transforms, inside of the context."""
    layers: list[Any] = []
    levels = range(_begin_batched() - 1)
    try:
        for _ in (*levels, 0):
            _end_batched()
        while current_transform() is not None:
            layers.append(_pop_transform())
        yield
    finally:
        while layers:
            _push_transform(layers.pop())
        for _ in levels:
            _begin_batched()


# -- looks that none of them sees -------------------------------------------------------------------------------------


def run_unseen(function: Callable[..., Any], *args: Any) -> Any:
    """`function(*args)`, which neither modes of the user's nor torch's selective checkpointing notice."""
    if not is_dispatch_mode_active() and not _count_function_modes():
        return function(*args)
    with without_function_modes(), _disable_current_modes():
        return function(*args)


def run_beside_function_modes(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`function(*args, **kwargs)`, which no function mode of the user's notices."""
    with without_function_modes():
        return function(*args, **kwargs)


def copy_unseen(tensor: Tensor) -> Tensor:
    """A copy that neither autograd nor modes of the user's notice."""
    if not is_dispatch_mode_active() and not _count_function_modes():
        return (tensor.detach() if tensor.requires_grad else tensor).clone()
    with without_function_modes():
        if type(tensor) not in (Tensor, Parameter) or _machinery(_KEYS.PROXY):
            return tensor.detach().clone()
        with _disable_current_modes():
            return tensor.detach().clone()


def is_same_state(one: Any, other: Any) -> bool:
    """Compare states of a generator: tensors unseen by modes, of which one for fake tensors could not say."""
    return run_unseen(torch.equal, one, other) if isinstance(one, Tensor) else bool(one == other)


# Many tensors copied into others with one call; `torch.Tensor.copy_` costs a call of Python's for each.
copy_all: Callable[..., Any] = resolve_private(
    "copying many tensors in one call",
    "torch._foreach_copy_",
    probe=lambda copy: (x := torch.zeros(1, device="cpu"), copy([x], [torch.ones_like(x)]))[0].item() == 1,
    public=lambda targets, sources: [target.copy_(source) for target, source in zip(targets, sources)],
)

# -- fake tensors (`explain(fake=True)`) ------------------------------------------------------------------------------

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


def _hides_dispatch(without: Any) -> bool:
    with TorchDispatchMode(), without():  # which raises if it sees an op
        made = torch.empty_strided((2, 3), (1, 2), device="meta")
    return type(made) is Tensor and made.stride() == (1, 2)


# What runs inside goes to kernels at once: no dispatch mode and no tensor's own `__torch_dispatch__` sees it.
without_dispatch: Any = resolve_private(
    "making tensors beside fake ones",
    "torch._C._DisableTorchDispatch",
    probe=_hides_dispatch,
    public=_disable_current_modes,
)


def device_of(fake: Any) -> torch.device:
    """Return the device that a fake tensor gives as its own: torch asks several times an op, through every mode."""
    return torch.device("meta") if fake.fake_mode.in_kernel_invocation else fake.fake_device


_TORCH = f"{Path(torch.__file__).parent}{os.sep}"


def lacks_values(error: BaseException) -> bool:
    """Return whether torch has raised an error, as it does where a fake tensor has no values or an op no kernel for it.

    It has classes of its own for most of these. The others are plain errors of its C++, or come out of its Python, where a
    tensor is written as a text, say. An error that other code has raised has another reason: in the user's, in ours.
    """
    kind, where = type(error), error.__traceback__
    if issubclass(kind, torch.OutOfMemoryError):
        return False
    while where is not None and where.tb_next is not None:
        where = where.tb_next
    is_of_cpp = kind in (RuntimeError, NotImplementedError) or kind.__module__.startswith("torch.")
    return is_of_cpp or (where is not None and where.tb_frame.f_code.co_filename.startswith(_TORCH))


_LOGGER = logging.getLogger("torch._subclasses.fake_tensor")


def unlogged() -> Rewound:
    """Return a context in which torch logs no op that fake tensors cannot run: the caller has another way to run it."""
    return Rewound(lambda: _LOGGER.level, _LOGGER.setLevel, logging.CRITICAL + 1)

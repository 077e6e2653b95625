"""Modes: function and dispatch modes, fake tensors, transforms of `torch.func`, and settings that decide what ops compute."""

from __future__ import annotations

import functools
import logging
import operator
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from reactivate._torch.private_api import find, is_missing, resolve_private
from reactivate._torch.rng import accelerator_device

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


def copy_unseen(tensor: Tensor) -> Tensor:
    """A copy that neither autograd nor modes of the user's notice."""
    if not is_dispatch_mode_active() and not _count_function_modes():
        return (tensor.detach() if tensor.requires_grad else tensor).clone()
    with without_function_modes():
        if type(tensor) not in (Tensor, Parameter) or _machinery(_KEYS.PROXY):
            return tensor.detach().clone()
        with _disable_current_modes():
            return tensor.detach().clone()


def equal_unseen(one: Tensor, other: Tensor) -> bool:
    """Compare tensors unseen by the user's modes and by a fake-tensor mode, which could not say."""
    return run_unseen(torch.equal, one, other)


def is_same_state(one: Any, other: Any) -> bool:
    """Compare states of a generator: tensors unseen, anything else as it compares itself."""
    return equal_unseen(one, other) if isinstance(one, Tensor) else bool(one == other)


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


@contextmanager
def unlogged() -> Iterator[None]:
    """torch does not log the ops that fake tensors cannot run: the caller has another way to run them."""
    before = _LOGGER.level
    _LOGGER.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        _LOGGER.setLevel(before)


# -- settings that decide what ops compute ----------------------------------------------------------------------------

ask: Callable[[Callable[[], Any]], Any]
ask = getattr(operator, "call", None) or (lambda function: function())  # Python 3.11 has it in C


class Flag(NamedTuple):
    """A setting that decides what ops compute.

    Public context managers (`sdpa_kernel`, `autocast`, ...) cannot be asked for what is set, or cost microseconds each.
    """

    name: str
    read: Callable[[], Any]
    write: Callable[[Any], None]


def _attribute(path: str) -> tuple[Any, Any]:
    """Return how to read and write an attribute of `torch.backends`, some of which are properties of modules."""
    owner, _, name = f"backends.{path}".rpartition(".")
    return (
        lambda: getattr(attrgetter(owner)(torch), name),
        lambda value: setattr(attrgetter(owner)(torch), name, value),
    )


_PRECISIONS = {
    ("generic", "all"): "fp32_precision",
    ("mkldnn", "matmul"): "mkldnn.matmul.fp32_precision",
    ("cuda", "matmul"): "cuda.matmul.fp32_precision",
    ("cuda", "conv"): "cudnn.conv.fp32_precision",
    ("cuda", "rnn"): "cudnn.rnn.fp32_precision",
}
_get_precision, _put_precision = resolve_private(
    "the precision of float32 ops",
    "torch._C._get_fp32_precision_getter",
    "torch._C._set_fp32_precision_setter",
    probe=lambda get, put: all(isinstance(get(*key), str) for key in _PRECISIONS),
    public=(
        lambda *key: _attribute(_PRECISIONS[key])[0](),
        lambda backend, op, value: _attribute(_PRECISIONS[backend, op])[1](value),
    ),
)


def _fp32_precision(*key: str) -> Flag:
    read, write = (functools.partial(function, *key) for function in (_get_precision, _put_precision))
    return Flag(f"{' '.join(key)} fp32_precision", read, write)


def _read_float32_matmul() -> str | None:
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # the newer flags say something that this older one has no word for
        return None


def _write_float32_matmul(value: str | None) -> None:
    if value is not None:
        torch.set_float32_matmul_precision(value)


def _float32_matmul() -> Flag:
    """Return the precision of products on the CPU, with the older setting for all devices that goes with it."""
    flag = _fp32_precision("mkldnn", "matmul")
    older = {"none": "highest", "ieee": "highest", "tf32": "high", "bf16": "medium"}

    def write(value: str) -> None:
        _write_float32_matmul(older.get(value))  # which sets the newer as well; torch refuses to read some mixtures
        flag.write(value)

    return flag._replace(write=write)


def _flag(name: str, read: str, public: Any, write: str = "") -> Flag:
    """Return a flag with private names, and with a public way: an attribute of `torch.backends`, or two functions."""
    names = f"torch._C._get_{read}", f"torch._C._set_{write or read}"
    public = _attribute(public) if isinstance(public, str) else public
    lost = "" if public else "the recomputation does not restore the flag"
    probe = lambda get, put: get() is not None  # noqa: E731
    return Flag(name, *resolve_private(f"the flag {name!r}", *names, probe=probe, public=public, lost=lost))


def _reduced_precision(dtype: str) -> Flag:
    name = f"allow_{dtype}_reduced_precision_reduction"
    flag = _flag(f"{dtype} reduction", f"cublas_{name}", f"cuda.matmul.{name}")

    def write(value: Any) -> None:  # a pair (allowed, with split-K) in newer torch, one bool in older
        flag.write(*value) if isinstance(value, tuple) else flag.write(value)

    return flag._replace(write=write)


def _sdp(name: str, public: str | None) -> Flag:
    """Return whether one of the kernels for attention may be taken."""
    cuda, kind = torch.backends.cuda, name.replace(" ", "_")
    ways = public and (getattr(cuda, f"{public}_sdp_enabled"), getattr(cuda, f"enable_{public}_sdp"))
    return _flag(f"{name} sdp", f"{kind}_sdp_enabled", ways, f"sdp_use_{kind}")


def _question(name: str) -> Callable[[], bool]:
    """Return a getter that costs no Python."""
    public: Callable[[], bool] = getattr(torch, f"{name}_enabled")
    private = f"torch._C._get_{name.removeprefix('are_').removeprefix('is_')}"
    found: Callable[[], bool] = resolve_private(
        f"`torch.{name}_enabled`", private, probe=lambda ask: ask() is public(), public=public
    )
    return found


def _autocast_dtype(kind: str) -> Flag:
    """Return the dtype of autocast on a type of device, which may be set where autocast is off."""
    ways = torch.get_autocast_dtype, torch.set_autocast_dtype
    return Flag(f"autocast dtype on {kind}", *(functools.partial(way, kind) for way in ways))


_is_deterministic = _question("are_deterministic_algorithms")
_CPU_FLAGS = (
    Flag("default dtype", torch.get_default_dtype, torch.set_default_dtype),
    Flag("deterministic", _is_deterministic, torch.use_deterministic_algorithms),
    Flag(
        "deterministic, warn only",
        _question("is_deterministic_algorithms_warn_only"),
        lambda value: torch.use_deterministic_algorithms(_is_deterministic(), warn_only=value),
    ),
    _float32_matmul(),
    _flag("mkldnn", "mkldnn_enabled", "mkldnn.enabled"),
    _sdp("flash", "flash"),
    _sdp("math", "math"),
    _autocast_dtype("cpu"),
    Flag("autocast cache", torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
    Flag("threads", torch.get_num_threads, torch.set_num_threads),
)


_choose_attention: Callable[[Tensor, Tensor, Tensor], Any] = resolve_private(
    "which kernel attention takes",
    "torch._fused_sdp_choice",
    probe=lambda choose: isinstance(choose(*[torch.empty(1, 1, 8, 8, device="cpu")] * 3), int),
    public=torch.nn.functional.scaled_dot_product_attention,
)


def _attention_order() -> Flag:
    """Return the order in which torch tries the kernels of attention.

    torch sets it in the first attention on a device: a recomputation of that one would go back to an order that attention
    never had. So torch has to choose a kernel before it is asked for the order. While the device is not initialized it
    cannot, and there is no order to go back to: None.
    """
    flag = _flag("sdp priority", "sdp_priority_order", None)
    if is_missing(flag.read):
        return flag
    is_set = False

    def read() -> Any:
        nonlocal is_set
        is_set = is_set or _set_attention_order()
        return flag.read() if is_set else None

    def write(value: Any) -> None:
        if value is not None:
            flag.write(value)

    return flag._replace(read=read, write=write)


_WAIT_FOR_ATTENTION = ("cuda", "xpu")  # types of devices on which torch sets it no sooner


def _asks_whether_initialized() -> Callable[[], bool]:
    device = accelerator_device()
    if device is None or device.type not in _WAIT_FOR_ATTENTION:
        return lambda: True
    found: Callable[[], bool] = torch.get_device_module(device).is_initialized
    return found


_is_initialized = _asks_whether_initialized()  # found once: on a build for GPUs without one each region asks


def _set_attention_order() -> bool:
    """Let torch set its order, and return whether it has one that stays."""
    if not _is_initialized():
        return False
    device = accelerator_device()
    if device is not None and device.type in _WAIT_FOR_ATTENTION:
        run_unseen(lambda: _choose_attention(*[torch.empty(1, 1, 8, 8, dtype=torch.float16, device=device)] * 3))
    return True


def _flags_of(accelerator: torch.device) -> tuple[Flag, ...]:
    return (
        *(_fp32_precision(*key) for key in _PRECISIONS if key[0] != "mkldnn"),
        Flag("float32 matmul", _read_float32_matmul, _write_float32_matmul),
        *map(_reduced_precision, ("fp16", "bf16")),
        *(
            _flag(f"cudnn {name}", f"cudnn_{name}", f"cudnn.{name}")
            for name in ("enabled", "benchmark", "deterministic")
        ),
        _sdp("mem efficient", "mem_efficient"),
        _sdp("cudnn", "cudnn"),
        _sdp("overrideable", None),
        _attention_order(),
        *map(_autocast_dtype, filter(torch.amp.is_autocast_available, [accelerator.type])),
    )


_ACCELERATOR = accelerator_device()
FLAGS: tuple[Flag, ...] = tuple(
    flag
    for flag in (*_CPU_FLAGS, *(() if _ACCELERATOR is None else _flags_of(_ACCELERATOR)))
    if not is_missing(flag.read) and not is_missing(flag.write)
)
with warnings.catch_warnings():  # torch 2.9 warns of the older flag once, when it is first read: that was not the user
    warnings.simplefilter("ignore")
    _read_float32_matmul()

is_any_autocast_enabled: Callable[[], bool] = resolve_private(
    "detecting autocast of any device type",
    "torch._C._is_any_autocast_enabled",
    probe=lambda ask: ask() in (True, False),
    public=lambda: any(map(torch.is_autocast_enabled, {"cpu", getattr(accelerator_device(), "type", "cpu")})),
)


def leave_autocast(nesting: int) -> None:
    """Leave `autocast` contexts until so many are open; with the last one go the casts that it kept."""
    count = torch.autocast_increment_nesting() and torch.autocast_decrement_nesting()
    while count > nesting:
        count = torch.autocast_decrement_nesting()
        if not count:
            torch.clear_autocast_cache()

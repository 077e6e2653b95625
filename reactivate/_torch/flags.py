"""Flags of torch and autocast: the settings that decide what ops compute."""

from __future__ import annotations

import functools
import json
import operator
import warnings
from collections.abc import Callable
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from reactivate._torch.modes import run_unseen
from reactivate._torch.private_api import is_missing, resolve_private
from reactivate._torch.rng import accelerator_device

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


def _torch_functions() -> tuple[Flag, Flag]:
    """Return whether subclasses of tensors are told of calls, and whether no function mode is, in this order."""
    are_subclasses, is_nothing, put, states = resolve_private(
        "whether subclasses of tensors are told of calls",
        "torch._C._is_torch_function_enabled",
        "torch._C._is_torch_function_all_disabled",
        "torch._C._set_torch_function_state",
        "torch._C._TorchFunctionState",
        lost="the recomputation does not restore the flag",
    )

    def tell_subclasses(value: bool) -> None:
        put(states.ENABLED if value else states.SUBCLASSES_DISABLED)

    def tell_nothing(value: bool) -> None:
        if value is not is_nothing():
            put(states.ALL_DISABLED if value else states.ENABLED)

    return Flag("functions of subclasses", are_subclasses, tell_subclasses), Flag(
        "no functions", is_nothing, tell_nothing
    )


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
    *_torch_functions(),
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
    return torch.get_device_module(device).is_initialized  # type: ignore[no-any-return]


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

_GUARDED = {
    "default_dtype": ["default dtype"],
    "deterministic_algorithms": ["deterministic"],
    "deterministic_algorithms_warn_only": ["deterministic, warn only"],
    "autocast_state": ["autocast cache", is_any_autocast_enabled],  # the dtype only where it is on
    "num_threads": ["threads"],
    "torch_function": ["functions of subclasses"],
    "torch_function_all_disabled": ["no functions"],
}
"""By what torch's guard calls them: the flags that it compares, and the question for what devices autocast is on."""


class NoGuard:
    """A guard that compares nothing, for where torch has none."""

    def check(self) -> bool:
        return True


FlagsGuard: Callable[[], Any] = resolve_private(
    "comparing many flags in one call",
    "torch._C._dynamo.guards.GlobalStateGuard",
    probe=lambda guard: guard().check() and isinstance(json.loads(guard().__getstate__()), dict),
    public=NoGuard,
)
"""Make an object whose `check()` returns whether the flags in `GUARDED`, and some more, are what they are now."""
GUARDED = frozenset(
    flag
    for name in ({} if FlagsGuard is NoGuard else json.loads(FlagsGuard().__getstate__()))
    for flag in _GUARDED.get(name, ())
)


def leave_autocast(nesting: int) -> None:
    """Leave `autocast` contexts until so many are open; with the last one go the casts that it kept."""
    count = torch.autocast_increment_nesting() and torch.autocast_decrement_nesting()
    while count > nesting:
        count = torch.autocast_decrement_nesting()
        if not count:
            torch.clear_autocast_cache()

"""Settings of torch's that decide what ops compute.

Public context managers for these (`sdpa_kernel`, `autocast`, ...) cannot be asked for what is set, or cost microseconds each;
the getters and setters below are what they call.
"""

from __future__ import annotations

import functools
import operator
import warnings
from collections.abc import Callable
from operator import attrgetter
from typing import Any, NamedTuple

import torch

from reactivate._torch.devices import accelerator_device
from reactivate._torch.ways import fastest, is_missing

ask: Callable[[Callable[[], Any]], Any]
ask = getattr(operator, "call", None) or (lambda function: function())  # Python 3.11 has it in C


class Flag(NamedTuple):
    """A setting that decides what ops compute."""

    name: str
    read: Callable[[], Any]
    write: Callable[[Any], None]


# -- where public names are ------------------------------------------------------------------------------------------


def _attribute(path: str) -> tuple[Any, Any]:
    """Return how to read and write an attribute of `torch.backends`."""
    owner, _, name = path.rpartition(".")
    find = attrgetter(owner) if owner else lambda backends: backends
    return lambda: getattr(find(torch.backends), name), lambda value: setattr(find(torch.backends), name, value)


_PRECISIONS = {
    ("generic", "all"): "fp32_precision",
    ("mkldnn", "matmul"): "mkldnn.matmul.fp32_precision",
    ("cuda", "matmul"): "cuda.matmul.fp32_precision",
    ("cuda", "conv"): "cudnn.conv.fp32_precision",
    ("cuda", "rnn"): "cudnn.rnn.fp32_precision",
}


def _read_precision(backend: str, op: str) -> Any:
    return _attribute(_PRECISIONS[backend, op])[0]()


def _write_precision(backend: str, op: str, value: str) -> None:
    _attribute(_PRECISIONS[backend, op])[1](value)


_get_precision, _put_precision = fastest(
    "the precision of float32 ops",
    "torch._C._get_fp32_precision_getter",
    "torch._C._set_fp32_precision_setter",
    probe=lambda get, put: all(isinstance(get(*key), str) for key in _PRECISIONS),
    public=(_read_precision, _write_precision),
)


def _fp32_precision(backend: str, op: str) -> Flag:
    read, write = (functools.partial(item, backend, op) for item in (_get_precision, _put_precision))
    return Flag(f"{backend} {op} fp32_precision", read, write)


def _flag(name: str, read: str, write: str, public: tuple[Any, Any] | None) -> Flag:
    lost = "" if public is not None else "the recomputation does not restore the flag"
    probe = lambda get, put: get() is not None  # noqa: E731
    found = fastest(
        f"the flag {name!r}", f"torch._C.{read}", f"torch._C.{write}", probe=probe, public=public, lost=lost
    )
    return Flag(name, *found)


def _reduced_precision(dtype: str) -> Flag:
    name = f"allow_{dtype}_reduced_precision_reduction"
    flag = _flag(f"{dtype} reduction", f"_get_cublas_{name}", f"_set_cublas_{name}", _attribute(f"cuda.matmul.{name}"))
    put = flag.write

    def write(value: Any) -> None:  # a pair (allowed, with split-K) in newer torch, one bool in older
        if isinstance(value, tuple):
            put(*value)
        else:
            put(value)

    return flag._replace(write=write)


def _sdp(name: str, kind: str, public: str | None) -> Flag:
    """Return whether one of the kernels for attention may be taken."""
    cuda = torch.backends.cuda
    ways = None if public is None else (getattr(cuda, f"{public}_sdp_enabled"), getattr(cuda, f"enable_{public}_sdp"))
    return _flag(f"{name} sdp", f"_get_{name.replace(' ', '_')}_sdp_enabled", f"_set_sdp_use_{kind}", ways)


def _cudnn(name: str) -> Flag:
    return _flag(f"cudnn {name}", f"_get_cudnn_{name}", f"_set_cudnn_{name}", _attribute(f"cudnn.{name}"))


# -- the flags --------------------------------------------------------------------------------------------------------


def _write_warn_only(value: bool) -> None:
    torch.use_deterministic_algorithms(torch.are_deterministic_algorithms_enabled(), warn_only=value)


def _question(name: str, public: Callable[[], bool]) -> Callable[[], bool]:
    """Return a getter that costs no Python."""
    found: Callable[[], bool] = fastest(
        f"`torch.{public.__name__}`", f"torch._C.{name}", probe=lambda ask: ask() is public(), public=public
    )
    return found


_is_deterministic = _question("_get_deterministic_algorithms", torch.are_deterministic_algorithms_enabled)
_is_warn_only = _question(
    "_get_deterministic_algorithms_warn_only", torch.is_deterministic_algorithms_warn_only_enabled
)

_CPU_FLAGS = (
    Flag("default dtype", torch.get_default_dtype, torch.set_default_dtype),
    Flag("deterministic", _is_deterministic, torch.use_deterministic_algorithms),
    Flag("deterministic, warn only", _is_warn_only, _write_warn_only),
    _fp32_precision("mkldnn", "matmul"),
    _flag("mkldnn", "_get_mkldnn_enabled", "_set_mkldnn_enabled", _attribute("mkldnn.enabled")),
    _sdp("flash", "flash", "flash"),
    _sdp("math", "math", "math"),
    Flag("threads", torch.get_num_threads, torch.set_num_threads),
)


def _read_float32_matmul() -> str | None:
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # the newer flags, which are above, say something that this older one has no word for
        return None


def _write_float32_matmul(value: str | None) -> None:
    if value is not None:
        torch.set_float32_matmul_precision(value)


def _cuda_flags() -> tuple[Flag, ...]:
    return (
        _fp32_precision("generic", "all"),
        _fp32_precision("cuda", "matmul"),
        _fp32_precision("cuda", "conv"),
        _fp32_precision("cuda", "rnn"),
        Flag("float32 matmul", _read_float32_matmul, _write_float32_matmul),
        _reduced_precision("fp16"),
        _reduced_precision("bf16"),
        *map(_cudnn, ("enabled", "benchmark", "deterministic")),
        _sdp("mem efficient", "mem_efficient", "mem_efficient"),
        _sdp("cudnn", "cudnn", "cudnn"),
        _sdp("overrideable", "overrideable", None),
        _flag("sdp priority", "_get_sdp_priority_order", "_set_sdp_priority_order", None),
    )


# A build without an accelerator has no use for the second half.
FLAGS: tuple[Flag, ...] = tuple(
    flag
    for flag in (_CPU_FLAGS if accelerator_device() is None else _CPU_FLAGS + _cuda_flags())
    if not is_missing(flag.read) and not is_missing(flag.write)
)
if accelerator_device() is not None:
    with (
        warnings.catch_warnings()
    ):  # torch 2.9 warns of the older flag once, when it is first read: that was not the user
        warnings.simplefilter("ignore")
        _read_float32_matmul()


def _is_autocast_enabled() -> bool:
    return any(map(torch.is_autocast_enabled, {"cpu", getattr(accelerator_device(), "type", "cpu")}))


is_any_autocast_enabled: Callable[[], bool] = fastest(
    "detecting autocast of any device type",
    "torch._C._is_any_autocast_enabled",
    probe=lambda ask: ask() in (True, False),
    public=_is_autocast_enabled,
)


def autocast_nesting() -> int:
    """Return how many `autocast` contexts are open."""
    nesting = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    return nesting


def leave_autocast(nesting: int) -> None:
    """Leave `autocast` contexts until so many are open; with the last one go the casts that it kept."""
    found = autocast_nesting()
    while found > nesting:
        found = torch.autocast_decrement_nesting()
        if not found:
            torch.clear_autocast_cache()

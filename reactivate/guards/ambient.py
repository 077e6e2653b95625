"""Ambient state (Rule 11): what is set around a call and decides what its ops do.

Flags of torch, autocast, function modes (`torch.device` as a context is one), dispatch modes of the user's, the current
device and stream: a recomputation runs under those that were around the forward pass. (Context variables are the engine's
affair: it runs every recomputation in the context of its forward pass.)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from itertools import filterfalse
from typing import Any, NamedTuple

import torch

from reactivate._backends import accelerator
from reactivate._torch.devices import accelerator_device
from reactivate._torch.flags import FLAGS, ask, autocast_nesting, is_any_autocast_enabled, leave_autocast
from reactivate._torch.modes import (
    dispatch_modes,
    function_modes,
    is_dispatch_mode_active,
    is_function_mode_active,
    replace_dispatch_modes,
    replace_function_modes,
)
from reactivate._types import Call, Guard

_FLAG_READERS = tuple(flag.read for flag in FLAGS)
_READERS = (
    *_FLAG_READERS,
    is_function_mode_active,
    is_dispatch_mode_active,
    is_any_autocast_enabled,
    accelerator_device,
)
_NOTHING_ELSE = [False, 0, False, None]  # what the last four say when there are flags and nothing else
_NO_MODES = [False, 0]
_AUTOCAST_TYPES = tuple(
    kind for kind in ("cpu", "cuda", "xpu", "mps", "hpu", "mtia", "xla") if torch.amp.is_autocast_available(kind)
)


class Ambient(Guard):
    """Everything that is set around the forward pass."""

    name = "ambient"
    _last: list[Any] | None = None

    def before(self, call: Call) -> Any:
        settings = list(map(ask, _READERS))
        if settings == self._last or _with_rest(settings) == self._last:  # many regions share one list
            return self._last
        if settings[len(_FLAG_READERS) :][:2] == _NO_MODES:  # a mode is compared as it likes, and must not be held
            self._last = settings
        return settings

    def skip(self, call: Call, token: Any) -> None:
        return None  # a function puts back what it sets

    def recompute(self, snapshot: Any) -> AbstractContextManager[Any]:
        settings = list(map(ask, _READERS))
        if settings == snapshot:  # as mostly; a snapshot of the same length has no rest
            return _LeftAsFound(settings)
        if _with_rest(settings) == snapshot and snapshot[-1].autocast is None:
            return _LeftAsFound(settings)  # under autocast there is always something to do: see `_autocast`
        return _as_it_was(snapshot[: len(FLAGS)], snapshot[-1] if len(snapshot) > len(_READERS) else _NO_REST)


def _with_rest(settings: list[Any]) -> list[Any]:
    """Return what all readers say, and behind it the rest where they say that there is something."""
    rest = settings[len(_FLAG_READERS) :]
    if rest != _NOTHING_ELSE:
        settings.append(_Rest.read(*rest))
    return settings


class _LeftAsFound:
    """A recomputation that changes no flags, unless it stops between two lines of which one puts back what the other set.

    Args:
        settings: what the flags are when it begins.
    """

    __slots__ = ("_nesting", "_settings")

    def __init__(self, settings: list[Any]) -> None:
        self._settings = settings

    def __enter__(self) -> None:
        self._nesting = autocast_nesting()

    def __exit__(self, *error: object) -> None:
        if list(map(ask, _FLAG_READERS)) != self._settings[: len(_FLAG_READERS)]:
            _write_flags(self._settings[: len(_FLAG_READERS)])
        if autocast_nesting() != self._nesting:
            leave_autocast(self._nesting)


class _Rest(NamedTuple):
    """Settings that are mostly absent."""

    function_modes: tuple[Any, ...]
    dispatch_modes: tuple[Any, ...]
    autocast: tuple[Any, ...] | None
    place: tuple[Any, Any] | None

    @classmethod
    def read(cls, has_function_mode: bool, has_dispatch_mode: int, is_autocast: bool, device: Any) -> _Rest:
        backend = None if device is None else accelerator()
        return cls(
            tuple(filterfalse(_is_ours, function_modes())) if has_function_mode else (),
            tuple(filter(_is_users, dispatch_modes())) if has_dispatch_mode else (),
            _read_autocast() if is_autocast else None,
            backend.read_place() if backend is not None and backend.is_initialized() else None,
        )


_NO_REST = _Rest((), (), None, None)


@contextmanager
def _as_it_was(flags: list[Any], rest: _Rest) -> Iterator[None]:
    with ExitStack() as stack:
        stack.enter_context(_LeftAsFound(list(map(ask, _FLAG_READERS))))
        _write_flags(flags)
        stack.enter_context(_autocast(rest.autocast))
        backend = accelerator()
        if backend is not None and rest.place is not None:
            stack.enter_context(backend.at_place(rest.place))
        stack.callback(replace_dispatch_modes, dispatch_modes())
        replace_dispatch_modes((*filterfalse(_is_users, dispatch_modes()), *rest.dispatch_modes))
        stack.callback(replace_function_modes, function_modes())
        replace_function_modes(rest.function_modes)
        yield


def _write_flags(values: list[Any]) -> None:
    for _ in range(2):  # setting one flag may set others
        for flag, value in zip(FLAGS, values):
            if flag.read() != value:
                flag.write(value)


def _is_ours(mode: Any) -> bool:
    return type(mode).__module__.partition(".")[0] == "reactivate"


def _is_users(mode: Any) -> bool:
    # torch's own count what runs (FLOPs, memory) or belong to its selective checkpointing, which has its own contexts.
    return type(mode).__module__.partition(".")[0] not in ("reactivate", "torch")


def _read_autocast() -> tuple[Any, ...]:
    kinds, backend = _AUTOCAST_TYPES, accelerator()
    if backend is not None and backend.device_type not in kinds:
        kinds = (*kinds, backend.device_type)
    return tuple((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds)


@contextmanager
def _autocast(settings: tuple[Any, ...] | None) -> Iterator[None]:
    """Autocast as in `settings`, None for off, without its cache of cast weights."""
    now, is_cached = _read_autocast(), torch.is_autocast_cache_enabled()
    # All threads have one cache. At the outermost level it is empty, and is dropped afterwards. Inside of an autocast that
    # is active it is that one's, with weights as they were cast at some other time, perhaps without a graph. A device's
    # thread counts levels of its own, but is told what is enabled around the backward.
    is_outermost = torch.autocast_increment_nesting() == 1 and not any(is_enabled for _, is_enabled, _ in now)
    _write_autocast(settings or tuple((kind, False, dtype) for kind, _, dtype in now))
    torch.set_autocast_cache_enabled(is_outermost)
    try:
        yield
    finally:
        torch.autocast_decrement_nesting()
        if is_outermost:
            torch.clear_autocast_cache()
        _write_autocast(now)
        torch.set_autocast_cache_enabled(is_cached)


def _write_autocast(settings: tuple[Any, ...]) -> None:
    for kind, is_enabled, dtype in settings:
        torch.set_autocast_enabled(kind, is_enabled)
        torch.set_autocast_dtype(kind, dtype)

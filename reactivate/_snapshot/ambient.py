"""Settings around a call that decide what its ops do: flags of torch, autocast, modes, the current device and stream."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from itertools import chain, filterfalse
from operator import itemgetter
from typing import Any, NamedTuple

import torch

from reactivate._backends import accelerator, current_place
from reactivate._setting import Rewound
from reactivate._snapshot.generators import state_of_generator, ways_of
from reactivate._snapshot.kinds import is_of_torch, package_of
from reactivate._snapshot.moment import Moment
from reactivate._snapshot.rewound_moment import RewoundMoment
from reactivate._snapshot.walk import DEPTH, Walk
from reactivate._torch.flags import FLAGS, GUARDED, FlagsGuard, ask, is_any_autocast_enabled, leave_autocast
from reactivate._torch.modes import (
    dispatch_modes,
    function_modes,
    is_dispatch_mode_active,
    is_function_mode_active,
    leave_dispatch_modes,
    replace_dispatch_modes,
    replace_function_modes,
)

_SETTINGS = (
    *(flag.read for flag in FLAGS),
    *(torch.autocast_increment_nesting, torch.autocast_decrement_nesting),  # the second: how many contexts are open
    *(is_function_mode_active, is_dispatch_mode_active, is_any_autocast_enabled),
)
READERS = (*_SETTINGS, current_place)
_GUARDED = {flag.read for flag in FLAGS if flag.name in GUARDED} | {is_any_autocast_enabled}.intersection(GUARDED)
_beside_guard = itemgetter(*(index for index, read in enumerate(READERS) if read not in _GUARDED))
_BESIDE_GUARD = _beside_guard(READERS)
"""What is asked beside torch's guard of many flags: where a model has just run, each of these calls costs a microsecond."""

_NESTING = len(FLAGS) + 1
_ASK_FOR_MORE = slice(-4, -1)  # of the readers: those that say whether there is more to read than they do
_NOTHING_MORE = [False, 0, False]
_AUTOCAST_TYPES = tuple(
    kind for kind in ("cpu", "cuda", "xpu", "mps", "hpu", "mtia", "xla") if torch.amp.is_autocast_available(kind)
)


class ModeState:
    """The contents of a mode of the user's at one moment, with what it leads to but for modules.

    Args:
        mode: the mode.

    Attributes:
        mode: the mode.
    """

    def __init__(self, mode: Any) -> None:
        self.mode = mode
        walk = Walk()
        walk.look(mode, "a mode", DEPTH)
        walk.finish()
        self._moment = Moment(walk.holders, walk.tensors, (), None)
        self._generators = [(generator, state_of_generator(generator)) for generator in walk.generators]

    @contextmanager
    def rewound(self) -> Iterator[None]:
        """Let the mode hold that, for as long as the context lasts."""
        with ExitStack() as stack:
            for generator, state in self._generators:
                stack.enter_context(Rewound(*ways_of(generator), state))
            stack.enter_context(RewoundMoment(self._moment))
            yield


class _Recomputing(threading.local):
    """The number of open contexts of autocast when a recomputation began that has the cache for itself; -1 without one."""

    level = -1


_recomputing = _Recomputing()  # of the thread, since each recomputation runs among the context variables of its forward


class AmbientState:
    """Settings around the calling code.

    As a context: a recomputation that changes no settings, unless it stops between two lines of which one puts back what the
    other set.

    Attributes:
        values: what `READERS` say.
        rest: modes and autocast, None without any, as mostly.
        mode_states: of the user's modes, if that was noted.
    """

    __slots__ = ("_beside_guard", "_is_guard_held", "mode_states", "rest", "values")

    def __init__(self) -> None:
        # Before the values: what another thread sets in between is seen as a difference.
        self._is_guard_held = FlagsGuard().check
        self.values = list(map(ask, READERS))
        self._beside_guard = list(_beside_guard(self.values))
        self.rest = _Rest.read(self.values)
        self.mode_states: Sequence[ModeState] = ()

    def note_modes(self) -> None:
        """Note what the modes hold: a recomputation runs under them, and they may count."""
        if self.rest is not None:
            modes = (*self.rest.function_modes, *self.rest.dispatch_modes)
            self.mode_states = [ModeState(mode) for mode in modes if _is_users(mode)]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AmbientState) and self.values == other.values and self.rest == other.rest

    __hash__ = None  # type: ignore[assignment]

    def is_set(self) -> bool:
        """Return whether these are the settings around the calling code."""
        if self._is_guard_held() and list(map(ask, _BESIDE_GUARD)) == self._beside_guard:
            return self.rest is None or self.rest == _Rest.read(self.values)
        # The guard compares more than what counts here, such as whether gradients are on.
        values = list(map(ask, READERS))
        return values == self.values and (self.rest is None or self.rest == _Rest.read(values))

    def rewound(self) -> AbstractContextManager[Any]:
        """Return a context in which everything is set as here."""
        # Under autocast there is always something to do: see `_autocast`.
        if self.is_set() and (self.rest is None or self.rest.autocast is None):
            return self
        return _as_it_was(self)

    __enter__ = object.__hash__  # nothing is to be done, and not in Python

    def __exit__(self, *error: object) -> None:
        if self._is_guard_held() and list(map(ask, _BESIDE_GUARD)) == self._beside_guard:
            return
        if list(map(ask, _SETTINGS)) != self.values[:-1]:
            self._put_back()

    def _put_back(self) -> None:
        rest = self.rest or _NO_REST
        _write_flags(self.values)
        leave_autocast(self.values[_NESTING])
        _write_autocast(rest.autocast or tuple((kind, False, dtype) for kind, _, dtype in _read_autocast()))
        leave_dispatch_modes(self.values[-3])
        replace_function_modes(
            tuple(mode for mode in function_modes() if _is_ours(mode) or mode in rest.function_modes)
        )


class _Rest(NamedTuple):
    function_modes: tuple[Any, ...]
    dispatch_modes: tuple[Any, ...]
    autocast: tuple[Any, ...] | None

    @classmethod
    def read(cls, values: list[Any]) -> _Rest | None:
        """Read what `READERS` say is there; None if that is nothing."""
        has_function_mode, has_dispatch_mode, is_autocast = more = values[_ASK_FOR_MORE]
        if more == _NOTHING_MORE and not is_autocast:
            return None
        return cls(
            tuple(filterfalse(_is_ours, function_modes())) if has_function_mode else (),
            tuple(filter(_is_users, dispatch_modes())) if has_dispatch_mode else (),
            _read_autocast() if is_autocast else None,
        )


_NO_REST = _Rest((), (), None)


@contextmanager
def _as_it_was(state: AmbientState) -> Iterator[None]:
    values, rest = state.values, state.rest or _NO_REST
    modes, backend, place = (dispatch_modes(), function_modes()), accelerator(), values[-1]
    at_place = nullcontext() if backend is None or place is None else backend.at_place(place)
    # A mode around the backward sees the recomputation as well, and keeps what it has seen.
    around = set(map(id, chain(*modes)))
    with ExitStack() as stack, AmbientState():
        for mode_state in state.mode_states:
            if id(mode_state.mode) not in around:
                stack.enter_context(mode_state.rewound())
        _write_flags(values)
        with _autocast(rest.autocast, values[_NESTING]), at_place:
            replace_dispatch_modes((*filterfalse(_is_users, modes[0]), *rest.dispatch_modes))
            replace_function_modes(rest.function_modes)
            count = is_dispatch_mode_active()
            try:
                yield
            finally:
                leave_dispatch_modes(count)
                replace_dispatch_modes(modes[0])
                replace_function_modes(modes[1])


def _write_flags(values: list[Any]) -> None:
    for _ in range(2):  # setting one flag may set others
        for flag, value in zip(FLAGS, values):
            if flag.read() != value:
                flag.write(value)


def _is_ours(mode: Any) -> bool:
    return package_of(type(mode)) == "reactivate"


def _is_users(mode: Any) -> bool:
    # torch's own count what runs (FLOPs, memory) or belong to its selective checkpointing, which has its own contexts.
    return not is_of_torch(type(mode))


def _read_autocast() -> tuple[Any, ...]:
    kinds, backend = _AUTOCAST_TYPES, accelerator()
    if backend is not None and backend.device_type not in kinds:
        kinds = (*kinds, backend.device_type)
    return tuple((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds)


@contextmanager
def _autocast(settings: tuple[Any, ...] | None, nesting: int) -> Iterator[None]:
    """Autocast as in `settings`, None for off, without its cache of cast weights.

    Args:
        settings: as `_read_autocast` returns them.
        nesting: how many contexts the forward was inside of, enabled or not.
    """
    level = torch.autocast_increment_nesting()
    now, is_cached = _read_autocast(), torch.is_autocast_cache_enabled()
    is_outermost = level == 1 and not any(is_enabled for _, is_enabled, _ in now)
    if settings is None and nesting == 0 and is_outermost:
        torch.autocast_decrement_nesting()  # so that a context inside is the outermost, and drops its cache
        yield
        return
    # All threads have one cache. At the outermost level it is empty, and is dropped afterwards. Inside of an autocast that
    # is active it is that one's, with weights as they were cast at some other time, perhaps without a graph. A device's
    # thread counts levels of its own, but is told what is enabled around the backward. A recomputation that another one
    # waits for begins with an empty one too: what that had cast, it casts again.
    is_inside_of_another = _recomputing.level == level - 1
    is_alone = is_inside_of_another or is_outermost
    if is_inside_of_another:
        torch.clear_autocast_cache()
    before, _recomputing.level = _recomputing.level, level if is_alone else -1
    _write_autocast(settings or tuple((kind, False, dtype) for kind, _, dtype in now))
    torch.set_autocast_cache_enabled(is_alone and is_cached)
    try:
        yield
    finally:
        _recomputing.level = before
        torch.autocast_decrement_nesting()
        if is_alone:
            torch.clear_autocast_cache()
        _write_autocast(now)
        torch.set_autocast_cache_enabled(is_cached)


def _write_autocast(settings: tuple[Any, ...]) -> None:
    for kind, is_enabled, dtype in settings:
        torch.set_autocast_enabled(kind, is_enabled)
        torch.set_autocast_dtype(kind, dtype)

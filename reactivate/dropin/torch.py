"""`torch.utils.checkpoint`, with its signatures and meanings, on this engine.

`use_reentrant=True` runs on the engine too. What that lifts of the limits of torch's reentrant variant:

- keyword arguments and nested containers work, inputs need not require a gradient, and an output that is an input or
  does not depend on one is what it is without checkpointing;
- `torch.autograd.grad`, `backward(inputs=...)`, double backward and `retain_graph` work;
- detached parts and `torch.no_grad()` inside the function are right;
- early stop ends the recomputation as soon as nothing more is needed.

And of those of its non-reentrant variant: saved tensors may be read twice in one backward; a mutated argument, a module
in another mode, an RNG of any device, batch norm's statistics are right or refused (see the docs, "What is promised").
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from operator import is_
from typing import Any

from torch import is_grad_enabled
from torch.compiler import is_compiling, is_dynamo_compiling
from torch.nn import Sequential
from torch.utils.checkpoint import (
    SAC_IGNORED_OPS,
    CheckpointError,
    CheckpointPolicy,
    DefaultDeviceType,
    SelectiveCheckpointContext,
    check_backward_validity,
    create_selective_checkpoint_contexts,
    detach_variable,
    get_device_states,
    noop_context_fn,
    set_device_states,
)

from reactivate._compat import NotTraced, checkpoint_in_graph, runs_as_traced, warn_of_running_as_traced
from reactivate._engine.record import Options
from reactivate._engine.region import Region, module_called_by, run, run_module
from reactivate._engine.sharing import current_group, shared_replay
from reactivate._engine.site_log import set_aside
from reactivate._in_jax import is_traced, run_traced
from reactivate.errors import ReactivateError, ReplayMismatchError, UsageError
from reactivate.guards import DEFAULT, ContextPair, Guards

__all__ = [
    "SAC_IGNORED_OPS",
    "CheckpointError",
    "CheckpointFunction",
    "CheckpointPolicy",
    "DefaultDeviceType",
    "GraphExecGroup",
    "SelectiveCheckpointContext",
    "check_backward_validity",
    "checkpoint",
    "checkpoint_sequential",
    "create_selective_checkpoint_contexts",
    "detach_variable",
    "get_device_states",
    "noop_context_fn",
    "set_checkpoint_debug_enabled",
    "set_checkpoint_early_stop",
    "set_device_states",
]

# What existing code (and torch's own tests) look for in the messages.
_WORDS_OF_TORCH = {
    "fewer": "A different number of tensors was saved",
    "more": "trying to save more tensors during recomputation",
    "metadata": "Recomputed values for the following tensors have different metadata",
    "values": "Recomputed values for the following tensors have different values",
}

_early_stop: ContextVar[bool | None] = ContextVar("reactivate.dropin.torch.early_stop", default=None)
_debug: ContextVar[bool | None] = ContextVar("reactivate.dropin.torch.debug", default=None)


class _MismatchError(ReplayMismatchError, CheckpointError):
    """A replay that differs, for `except CheckpointError` as well."""


class _Options(Options):
    """Options whose errors are torch's too (Rule 18)."""

    def exception(self, error: ReactivateError) -> BaseException:
        if not isinstance(error, ReplayMismatchError):
            return error
        lines = [
            str(error).replace('`determinism="values"`', "`debug=True`"),
            f"(In torch.utils.checkpoint: {_WORDS_OF_TORCH[error.kind]}.)",
        ]
        if self.determinism == "values":
            lines.append("You are seeing this error because you passed `debug=True` to checkpoint.")
        return _MismatchError("\n".join(lines), kind=error.kind)


guards: Guards = DEFAULT
"""The guards of every region. `install` has an instance of this module of its own, with its own guards."""

replaced: dict[str, Any] = {}
"""torch's own functions, by name, that those of this instance are in the place of: what compilers are to trace."""


@functools.cache
def _options(guards: Guards, preserve_rng_state: bool, early_stop: bool, determinism: str) -> Options:
    if not preserve_rng_state and determinism == "first":  # other random numbers are no mistake there
        determinism = "metadata"
    if not preserve_rng_state and "rng" in guards.names():
        guards = guards.without("rng")
    return _Options(tuple(guards), early_stop, determinism)


_USUAL = (True, noop_context_fn, "default", False, True, None, None, DEFAULT)  # as mostly: found by identities
_USUAL_OPTIONS = _Options(tuple(DEFAULT))


def _options_of_call(
    preserve_rng_state: bool, context_fn: Any, determinism_check: str, debug: bool, early_stop: bool
) -> Options:
    is_debugging, stops = _debug.get(), _early_stop.get()
    asked = (preserve_rng_state, context_fn, determinism_check, debug, early_stop, is_debugging, stops, guards)
    if all(map(is_, asked, _USUAL)):
        return _USUAL_OPTIONS
    is_debugging = debug if is_debugging is None else is_debugging
    if is_debugging and context_fn is not noop_context_fn:
        raise UsageError("debug=True is incompatible with non-default context_fn.")
    if determinism_check not in ("default", "none"):
        raise UsageError(f"determinism_check should be one of ['default', 'none'], but got {determinism_check!r}.")
    determinism = "values" if is_debugging else "first" if determinism_check == "default" else "none"
    options = _options(guards, preserve_rng_state, early_stop if stops is None else stops, determinism)
    if context_fn is noop_context_fn:
        return options
    pair = ContextPair(context_fn, keeps_random_numbers=preserve_rng_state)
    return _Options((*options.guards, pair), options.early_stop, options.determinism)


def checkpoint(
    function: Callable[..., Any],
    *args: Any,
    use_reentrant: bool | None = None,
    context_fn: Callable[[], Any] = noop_context_fn,
    determinism_check: str = "default",
    debug: bool = False,
    early_stop: bool = True,
    **kwargs: Any,
) -> Any:
    """`torch.utils.checkpoint.checkpoint` on this engine: the same arguments and meanings.

    Args:
        function: what to checkpoint; called with `args` and what is left of `kwargs`.
        use_reentrant: both variants run on this engine; True and False differ in nothing but the options that torch
            refuses for the reentrant one. A warning asks for it if it is not given, as torch's does.
        context_fn: () -> (context for the forward pass, context for a recomputation).
        determinism_check: "default" compares shape, dtype and device of what is recomputed, and in some calls (the 1st,
            2nd, 4th, 8th, ...) a checksum, unless `preserve_rng_state=False`; "none" compares nothing.
        debug: name the first op that differs, with the ops of both passes around it.
        early_stop: end a recomputation when nothing more is needed.
        kwargs: `preserve_rng_state=False` leaves random numbers out; everything else goes to `function`.

    Raises:
        CheckpointError: a recomputation differs from the forward pass. It is a `ReplayMismatchError` too.
        ReactivateError: see `reactivate.checkpoint`.
        ValueError: an option that does not go with another.

    Example:
        >>> import torch
        >>> from reactivate.dropin.torch import checkpoint
        >>> x = torch.randn(4, requires_grad=True)
        >>> checkpoint(lambda x: x.sin().exp(), x, use_reentrant=False).sum().backward()
    """
    if use_reentrant is None:
        _warn_reentrant("torch.utils.checkpoint")
        use_reentrant = True
    if use_reentrant and (context_fn is not noop_context_fn or debug):
        raise UsageError("Passing `context_fn` or `debug` is only supported when use_reentrant=False.")
    preserve_rng_state = kwargs.pop("preserve_rng_state", True)
    if is_compiling():
        if replaced and not is_dynamo_compiling():  # Dynamo knows the installed function, and does not look inside
            return replaced["checkpoint"](
                function,
                *args,
                use_reentrant=False,
                context_fn=context_fn,
                determinism_check=determinism_check,
                debug=debug,
                early_stop=early_stop,
                preserve_rng_state=preserve_rng_state,
                **kwargs,
            )
        try:
            return checkpoint_in_graph(function, args, kwargs, None if context_fn is noop_context_fn else context_fn)
        except NotTraced:
            pass
    if context_fn is not noop_context_fn and runs_as_traced(function):
        warn_of_running_as_traced()
        return function(*args, **kwargs)
    options = _options_of_call(preserve_rng_state, context_fn, determinism_check, debug, early_stop)
    if "torchax" in sys.modules and is_traced(function, args, kwargs):
        return run_traced(function, args, kwargs, options)
    module = module_called_by(function)
    if module is None:
        return run(function, args, kwargs, options)
    return run_module(module, args, kwargs, options)


def checkpoint_sequential(
    functions: Sequential | Sequence[Callable[..., Any]],
    segments: int,
    input: Any,  # noqa: A002 - torch's name
    use_reentrant: bool | None = None,
    **kwargs: Any,
) -> Any:
    """`torch.utils.checkpoint.checkpoint_sequential` on this engine: the same arguments and meanings.

    Args:
        functions: a `Sequential`, or a list of functions to run one after the other.
        segments: into how many parts to cut the list; all but the last are checkpointed.
        input: what the first function gets.
        use_reentrant: as in `checkpoint`.
        kwargs: `preserve_rng_state`.

    Raises:
        ValueError: `segments` is not a number from 1 to the number of functions; or an unknown keyword argument.
    """
    if use_reentrant is None:
        _warn_reentrant("torch.utils.checkpoint.checkpoint_sequential")
        use_reentrant = True
    preserve_rng_state = kwargs.pop("preserve_rng_state", True)
    if kwargs:
        raise UsageError(f"Unexpected keyword arguments: {','.join(kwargs)}. There is: preserve_rng_state.")
    chain = list(functions.children()) if isinstance(functions, Sequential) else list(functions)
    if isinstance(segments, bool) or not isinstance(segments, int) or not 1 <= segments <= max(1, len(chain)):
        raise UsageError(
            f"segments={segments!r}: it has to be a whole number from 1 to {max(1, len(chain))}, how many functions "
            "there are."
        )
    size, value = len(chain) // segments, input
    for start in range(0, size * (segments - 1), size):
        part = functools.partial(_run_chain, chain[start : start + size])
        value = checkpoint(part, value, use_reentrant=use_reentrant, preserve_rng_state=preserve_rng_state)
    return _run_chain(chain[size * (segments - 1) :], value)


def _run_chain(chain: Sequence[Callable[..., Any]], value: Any) -> Any:
    for function in chain:
        value = function(value)
    return value


def _warn_reentrant(name: str) -> None:
    warnings.warn(
        f"{name}: the use_reentrant parameter should be passed explicitly. torch will raise without it. With "
        "reactivate both variants run on the same engine, so pass use_reentrant=False.",
        stacklevel=3,
    )


@contextmanager
def set_checkpoint_early_stop(enable: bool | None) -> Iterator[None]:
    """Override `early_stop` for the forward passes inside of the context; None leaves it to them."""
    token = _early_stop.set(enable)
    try:
        yield
    finally:
        _early_stop.reset(token)


@contextmanager
def set_checkpoint_debug_enabled(enabled: bool | None) -> Iterator[None]:
    """Override `debug` for the forward passes inside of the context; None leaves it to them."""
    token = _debug.set(enabled)
    try:
        yield
    finally:
        _debug.reset(token)


class GraphExecGroup(shared_replay):
    """`torch.utils.checkpoint.GraphExecGroup`: backward calls inside of it share one recomputation of each region.

    Two of them may need the same saved tensor; torch refuses that, here the region is recomputed once more.
    """

    @classmethod
    def _get_current_group(cls) -> shared_replay | None:
        """What torch's own engine asks for, in the backward of regions that were there before `install`."""
        return current_group()


class CheckpointFunction:
    """`torch.utils.checkpoint.CheckpointFunction`, for code that applies it directly."""

    @staticmethod
    def apply(run_function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        """`checkpoint(run_function, *args, use_reentrant=True)`."""
        return checkpoint(run_function, *args, use_reentrant=True, preserve_rng_state=preserve_rng_state)


def checkpoint_without_reentrant_generator(
    fn: Callable[..., Any],
    preserve_rng_state: bool = True,
    context_fn: Callable[[], Any] = noop_context_fn,
    determinism_check: str = "default",
    debug: bool = False,
    early_stop: bool = True,
    *args: Any,
    **kwargs: Any,
) -> Iterator[None]:
    """A region around whatever runs between the two steps of this generator.

    torch's composable `checkpoint` (`torch.distributed._composable`) is made of it: it steps in a module's forward
    hooks.
    """
    if replaced and is_compiling():
        yield from replaced["_checkpoint_without_reentrant_generator"](
            fn, preserve_rng_state, context_fn, determinism_check, debug, early_stop, *args, **kwargs
        )
        return
    if not is_grad_enabled():
        yield
        return
    options = _options_of_call(preserve_rng_state, context_fn, determinism_check, debug, early_stop)
    region = Region()
    with set_aside():
        plainly = region.begin(fn, args, kwargs, options)
    if plainly is not None:
        yield
        return
    try:
        yield
    except BaseException as error:
        region.fail(error)
        raise
    region.end(None)

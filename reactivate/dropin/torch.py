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
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
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

from reactivate._passes.logs import set_aside
from reactivate._region.region import Region
from reactivate._region.run import runner_of
from reactivate._region.sharing import current_group, shared_recompute
from reactivate._run import run_untraced
from reactivate._setting import set_to
from reactivate._torch.dynamo import (
    NotTraced,
    checkpoint_in_graph,
    is_jit_tracing,
    runs_as_traced,
    warn_of_running_as_traced,
)
from reactivate._types import Storage
from reactivate.dropin._asked import Asked, warn_reentrant
from reactivate.dropin._installation import Tally
from reactivate.errors import UsageError
from reactivate.guards import DEFAULT, Guards
from reactivate.storage import Host

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

_early_stop: ContextVar[bool | None] = ContextVar("reactivate.dropin.torch.early_stop", default=None)
_debug: ContextVar[bool | None] = ContextVar("reactivate.dropin.torch.debug", default=None)

# Those of every region. `install` has an instance of this module of its own, with its own ones.
guards: Guards = DEFAULT
storage: Storage = Host()
tally = Tally()

replaced: dict[str, Any] = {}
"""torch's own functions, by name, that those of this instance are in the place of: what compilers are to trace."""


def checkpoint(
    function: Callable[..., Any] | None = None,
    *args: Any,
    use_reentrant: bool | None = None,
    preserve_rng_state: bool = True,
    context_fn: Callable[[], Any] = noop_context_fn,
    determinism_check: str = "default",
    debug: bool = False,
    early_stop: bool = True,
    respect_saved_tensors_hooks: bool | None = None,
    **kwargs: Any,
) -> Any:
    """`torch.utils.checkpoint.checkpoint` on this engine: the arguments and meanings of the newest torch, on every torch.

    Args:
        function: what to checkpoint; called with `args` and `kwargs`. Without it, `checkpoint` returns a decorator with
            these options.
        use_reentrant: both variants run on this engine; True and False differ in nothing but the options that torch
            refuses for the reentrant one. A warning asks for it if it is not given, as torch's does.
        preserve_rng_state: False leaves random numbers out.
        context_fn: () -> (context for the forward pass, context for a recomputation). What policies of torch's selective
            checkpointing offload (`MUST_CPU_OFFLOAD`, `PREFER_CPU_OFFLOAD`; torch >= 2.13) is kept in the host's memory.
            torch's own engine computes it again.
        determinism_check: "default" compares shape, dtype and device of what is recomputed, and in some calls (the 1st,
            2nd, 4th, 8th, ...) a checksum, unless `preserve_rng_state=False`; "none" compares nothing.
        debug: name the first op that differs, with the ops of both passes around it.
        early_stop: end a recomputation when nothing more is needed.
        respect_saved_tensors_hooks: whether saved-tensor hooks around the region get what torch's selective checkpointing
            keeps inside of it (torch >= 2.14). None: they do not, and a warning says so where there are such hooks.

    Raises:
        CheckpointError: a recomputation differs from the forward pass. It is a `RecomputeMismatchError` too.
        ReactivateError: see `reactivate.checkpoint`.
        ValueError: an option that does not go with another.

    Examples:
        >>> import torch
        >>> from reactivate.dropin.torch import checkpoint
        >>> x = torch.randn(4, requires_grad=True)
        >>> checkpoint(lambda x: x.sin().exp(), x, use_reentrant=False).sum().backward()
        >>> @checkpoint(use_reentrant=False)
        ... def block(x):
        ...     return x.sin().exp()
        >>> block(x).sum().backward()
    """
    asked = Asked(preserve_rng_state, context_fn, determinism_check, debug, early_stop, respect_saved_tensors_hooks)
    if function is not None or args:
        return _checkpoint(function, args, kwargs, use_reentrant, asked)
    if kwargs:
        raise UsageError(f"Unexpected keyword arguments: {','.join(kwargs)}")
    return functools.partial(_decorated, use_reentrant, asked)


def checkpoint_impl(
    function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, use_reentrant: bool | None = None, **options: Any
) -> Any:
    """`checkpoint(function, *args, **options, **kwargs)`: what torch's decorated functions call."""
    return _checkpoint(function, args, kwargs, use_reentrant, Asked(**options))


def _decorated(use_reentrant: bool | None, asked: Asked, function: Callable[..., Any]) -> Callable[..., Any]:
    options = {"use_reentrant": use_reentrant, **asked._asdict()}

    @functools.wraps(function, updated=())
    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        return checkpoint_impl(function, args, kwargs, **options)  # by its name: `remove` makes it torch's

    return checkpointed


def _checkpoint(
    function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], use_reentrant: bool | None, asked: Asked
) -> Any:
    if use_reentrant is None:
        warn_reentrant("torch.utils.checkpoint", stacklevel=4)
        use_reentrant = True
    has_contexts = asked.context_fn is not noop_context_fn
    if use_reentrant and (has_contexts or asked.debug or asked.respect_saved_tensors_hooks is not None):
        raise UsageError(
            "Passing `context_fn`, `debug`, or `respect_saved_tensors_hooks` is only supported when use_reentrant=False."
        )
    if is_compiling():
        if replaced and not is_dynamo_compiling():  # Dynamo knows the installed function, and does not look inside
            return _checkpoint_of_torch(function, args, kwargs, asked)
        try:
            return checkpoint_in_graph(function, args, kwargs, asked.context_fn if has_contexts else None)
        except NotTraced:
            pass
    if has_contexts and runs_as_traced(function):
        warn_of_running_as_traced()
        return function(*args, **kwargs)
    options = asked.options(guards, storage, _debug.get(), _early_stop.get())
    tally.add()
    runner, called = runner_of(function)
    return run_untraced(runner, options, called, args, kwargs)


def _checkpoint_of_torch(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], asked: Asked) -> Any:
    """Call torch's own `checkpoint` with these options."""
    options = asked._asdict()
    if "_checkpoint_impl" in replaced:  # which torch's `checkpoint` calls
        return replaced["_checkpoint_impl"](function, args, kwargs, use_reentrant=False, **options)
    del options["respect_saved_tensors_hooks"]
    return replaced["checkpoint"](function, *args, use_reentrant=False, **options, **kwargs)


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
        warn_reentrant("torch.utils.checkpoint.checkpoint_sequential", stacklevel=3)
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
    value, size = input, len(chain) // segments
    last = size * (segments - 1)
    for start in range(0, last, size):
        part = functools.partial(_run_chain, chain[start : start + size])
        value = checkpoint(part, value, use_reentrant=use_reentrant, preserve_rng_state=preserve_rng_state)
    return _run_chain(chain[last:], value)


def _run_chain(chain: Sequence[Callable[..., Any]], value: Any) -> Any:
    for function in chain:
        value = function(value)
    return value


def set_checkpoint_early_stop(enable: bool | None) -> AbstractContextManager[None]:
    """Override `early_stop` for the forward passes inside of the context; None leaves it to them."""
    return set_to(_early_stop, enable)


def set_checkpoint_debug_enabled(enabled: bool | None) -> AbstractContextManager[None]:
    """Override `debug` for the forward passes inside of the context; None leaves it to them."""
    return set_to(_debug, enabled)


class GraphExecGroup(shared_recompute):
    """`torch.utils.checkpoint.GraphExecGroup`: backward calls inside of it share one recomputation of each region.

    Two of them may need the same saved tensor, as a norm's do. torch refuses that; here the tensor is kept for both.
    """

    @classmethod
    def _get_current_group(cls) -> shared_recompute | None:
        """Return what torch's own engine asks for, in the backward of regions that were there before `install`."""
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
    respect_saved_tensors_hooks: bool | None = None,
    **kwargs: Any,
) -> Iterator[None]:
    """`checkpoint_generator_impl(fn, args, kwargs)`, with these options."""
    asked = Asked(preserve_rng_state, context_fn, determinism_check, debug, early_stop, respect_saved_tensors_hooks)
    return checkpoint_generator_impl(fn, args, kwargs, **asked._asdict())


def checkpoint_generator_impl(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], **options: Any
) -> Iterator[None]:
    """A region around whatever runs between the two steps of this generator.

    torch's composable `checkpoint` (`torch.distributed._composable`) is made of it: it steps in a module's forward
    hooks.
    """
    asked = Asked(**options)
    if replaced and is_compiling():
        yield from _generator_of_torch(fn, args, kwargs, asked)
        return
    if not is_grad_enabled() or is_jit_tracing():
        yield
        return
    tally.add()
    region = Region()
    with set_aside():
        plainly = region.begin(fn, args, kwargs, asked.options(guards, storage, _debug.get(), _early_stop.get()))
    if plainly is not None:
        yield
        return
    try:
        yield
    except BaseException as error:
        region.fail(error)
        raise
    region.end(None)


def _generator_of_torch(fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any], asked: Asked) -> Iterator[None]:
    """Return torch's own generator around a region, with these options."""
    name = "_checkpoint_without_reentrant_generator"
    if f"{name}_impl" in replaced:  # which the other one calls
        return replaced[f"{name}_impl"](fn, args, kwargs, **asked._asdict())  # type: ignore[no-any-return]
    return replaced[name](fn, *asked[:-1], *args, **kwargs)  # type: ignore[no-any-return]

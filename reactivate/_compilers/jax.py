"""Regions inside of a trace of JAX: torchax runs torch's modules there, and JAX differentiates them.

Autograd of torch's keeps nothing in a trace (`jax.jit`, `jax.grad`), so there is nothing for a region to drop. What
JAX keeps, `jax.checkpoint` decides, so the region becomes one of its own. JAX traces a function once and recomputes
from the trace: there is no second call that could do something else, and nothing for guards to put back.

What a function of JAX writes must come out of it as a result. A region may write to buffers and arguments, and draws
from the key of random numbers that torchax keeps; all of these come out, and are put where they were found.

Outside of a trace torchax's tensors are tensors like others, and the engine has the regions.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import Tensor
from torch.nn import Module

from reactivate._compilers.jax_names import Array, Key, environment_of, is_of_jax, is_tracing, jax, root_of
from reactivate._engine.inputs.capture import Capture
from reactivate._engine.kept_calls.choice import CallDecision, Choice
from reactivate._engine.kept_calls.site_log import Log, is_at_work, open_logs, set_aside, tensors_in
from reactivate._engine.record import Options, are_regions_off, plain_contexts
from reactivate._modules.standin import StandIn
from reactivate._torch.containers import flatten
from reactivate._torch.modules import has_hooks
from reactivate._types import DEVICE, Save
from reactivate.errors import UnsupportedError
from reactivate.guards import DEFAULT

__all__ = ["is_traced", "run_traced"]

Place = Array | Key  # that a region may write to

_depth: ContextVar[int] = ContextVar("reactivate.torchax.depth", default=0)  # how many regions of JAX are around


def is_traced(fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether JAX traces the call `fn(*args, **kwargs)`: then `run_traced` is for it, and the engine would do nothing.

    Plain tensors may be at work during a trace as well; a call that reaches no others is the engine's.

    Args:
        fn: a function or a module.
        args, kwargs: its arguments, as deep as you like.

    Examples:
        >>> from reactivate._compilers.jax import is_traced
        >>> is_traced(torch.sin, (torch.ones(2),), {})
        False
    """
    if not is_tracing():
        return False
    if any(map(is_of_jax, tensors_in(args, kwargs))):
        return True
    found = _reachable(fn, args, kwargs)
    return not found or any(map(is_of_jax, found))


def run_traced(fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any], options: Options) -> Any:
    """`fn(*args, **kwargs)`, of which JAX keeps what `options` say.

    Args:
        fn: a function or a module, whose hooks run outside of the region.
        args, kwargs: its arguments.
        options: with a policy, or without.

    Raises:
        UnsupportedError: the options ask for something that JAX does not have.
        UsageError: a part of the policy matches nothing.
    """
    if plain_contexts and are_regions_off():  # Rule 3
        return fn(*args, **kwargs)
    if isinstance(fn, Module) and has_hooks(fn):
        return _run_inside_hooks(fn, args, kwargs, options)
    if open_logs and is_at_work():  # calls inside of this region are not those of a region around it
        with set_aside():
            return run_traced(fn, args, kwargs, options)
    _refuse_untranslatable(options)
    return _checkpointed(fn, args, kwargs, None if options.choice is None else _NamingLog(options.choice))


def _run_inside_hooks(module: Module, args: tuple[Any, ...], kwargs: dict[str, Any], options: Options) -> Any:
    """Rule 21."""
    stand_in = StandIn.enter(module, functools.partial(run_traced, options=options))
    try:
        return module(*args, **kwargs)
    finally:
        stand_in.leave()


# -- what a region may write --------------------------------------------------------------------------------------------


def _checkpointed(fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any], names: _NamingLog | None) -> Any:
    """The result of the call, recomputed by JAX; what it wrote is in its place."""
    before = [(place, place.read()) for place in _places(fn, args, kwargs)]
    call, policy = (fn, None) if names is None else (functools.partial(names.watch, fn), names.policy)
    result: Any = None
    written: list[Place] = []

    def pure() -> list[Any]:
        nonlocal result, written
        result = call(*args, **kwargs)
        written = _written(before, _places(fn, (result, *args), kwargs))
        return [place.read() for place in written]

    try:
        with _inside():
            values = jax().checkpoint(pure, policy=policy)()
    except BaseException:  # Rule 13: leave no tracer of this trace anywhere
        _write(before)
        raise
    _write(zip(written, values))
    _refuse_backward(place.owner for place in written if isinstance(place, Array))
    return result


def _places(fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Place]:
    """List the places that a call can write to: the keys of random numbers, and every tensor that it reaches."""
    roots = _roots(_reachable(fn, args, kwargs))
    environments = [sys.modules["torchax"].default_env(), *map(environment_of, roots)]
    keys = [Key(environment) for environment in {id(found): found for found in environments}.values()]
    return [*keys, *map(Array, roots)]


def _written(before: Iterable[tuple[Place, Any]], after: Iterable[Place]) -> list[Place]:
    """Return the places that hold something else than before, and those that are new."""
    known = {id(place.owner): value for place, value in before}
    places = {id(place.owner): place for place in (*(place for place, _ in before), *after)}
    return [place for place in places.values() if place.read() is not known.get(id(place.owner))]


def _write(contents: Iterable[tuple[Place, Any]]) -> None:
    for place, value in contents:
        if place.read() is not value:
            place.write(value)


def _reachable(fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors among arguments and closures, and those of every module there."""
    capture = Capture(fn, args, kwargs)
    found = capture.reached()
    for module in capture.modules:
        found += tensors_in((module._parameters, module._buffers, vars(module)), {})
    return found


def _roots(tensors: Iterable[Tensor]) -> list[Any]:
    """torchax's tensors among `tensors`, each once: of a view, what it is a view of, where it writes to."""
    roots = map(root_of, filter(is_of_jax, tensors))
    return list({id(root): root for root in roots}.values())


@contextmanager
def _inside() -> Iterator[None]:
    token = _depth.set(_depth.get() + 1)
    try:
        yield
    finally:
        _depth.reset(token)


# -- what it keeps ----------------------------------------------------------------------------------------------------


class _NamingLog(Log):
    """Names the results of the calls that the policy saves, and lets JAX keep what bears the name.

    Args:
        choice: the policy's answers.
    """

    values = None

    def __init__(self, choice: Choice) -> None:
        super().__init__(self, choice)
        self._counts: dict[Any, int] = {}
        self._name = f"reactivate.saved.{_depth.get()}"  # JAX shows regions inside of this one to its policy, too

    @property
    def policy(self) -> Any:
        """The policy for `jax.checkpoint`."""
        return jax().checkpoint_policies.save_only_these_names(self._name)

    def watch(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """`fn(*args, **kwargs)`, every call in it shown to the policy."""
        self.open()
        try:
            result = fn(*args, **kwargs)
        finally:
            self.close()
        if self.choice.unmatched.parts:
            self.choice.unmatched.region_has_run(self.choice.region)
        return result

    def call(self, decision: CallDecision, fn: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        action = decision.action or self.choice.ask(decision, self._counts, args, kwargs)
        if type(action) is not Save:
            return fn(*args, **kwargs)
        if action.storage != DEVICE:
            _refuse_storage(self.choice.policy, action.storage)
        given = {id(root) for root in _roots(tensors_in(args, kwargs))}
        result = self.run_again(fn, args, kwargs)
        for root in _roots(leaf for leaf in flatten(result)[0] if isinstance(leaf, Tensor)):
            if id(root) not in given:  # a view of an argument computes nothing
                root.apply_jax_(_named, self._name)
        return result


def _named(array: Any, name: str) -> Any:
    return importlib.import_module("jax.ad_checkpoint").checkpoint_name(array, name)


# -- what is refused --------------------------------------------------------------------------------------------------


def _refuse_untranslatable(options: Options) -> None:
    if options.determinism == "values":
        raise UnsupportedError(
            'determinism="values" cannot be used inside of a trace of JAX: there are no values yet, and JAX recomputes '
            "from the trace, which cannot differ. Leave the option out there."
        )
    others = [guard for guard in options.guards if guard not in DEFAULT.members]
    if others:
        names = ", ".join(type(guard).__name__ for guard in others)
        raise UnsupportedError(
            f"These guards cannot be used inside of a trace of JAX: {names}. JAX recomputes from the trace and does not "
            "call the function again, so that there is no recomputation to guard. Leave them out there."
        )
    if options.choice is not None and options.choice.interest.functions:
        names = ", ".join(sorted(function.__name__ for function in options.choice.interest.functions))
        raise UnsupportedError(
            f"The policy {options.choice.policy!r} saves custom autograd functions ({names}), which JAX differentiates "
            "by what they are made of. Call it through reactivate.site(fn, name=...) and save that name."
        )


def _refuse_storage(policy: Any, storage: Any) -> None:
    raise UnsupportedError(
        f"The policy {policy!r} keeps results in {storage!r}; what JAX keeps inside of a trace stays on the device. Leave "
        "out storage= there."
    )


def _refuse_backward(tensors: Iterable[Tensor]) -> None:
    """torch's autograd has seen the tracers of a trace that is over: let no backward of its come to them."""
    for tensor in tensors:
        if tensor.grad_fn is not None:
            tensor.register_hook(_raise_backward)


def _raise_backward(gradient: Tensor) -> None:
    raise UnsupportedError(
        "A backward of torch's came to a region inside of a trace of JAX, where JAX has the gradients: differentiate with "
        "jax.grad or jax.value_and_grad, or call backward outside of jax.jit."
    )

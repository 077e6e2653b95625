"""`checkpoint`: a function that keeps its inputs for the backward, and nothing else."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterable
from types import FunctionType
from typing import Any, Literal, ParamSpec, TypeVar, get_args, overload

from torch.compiler import is_compiling
from torch.nn import Module

from reactivate._engine.choice import Choice, Unmatched
from reactivate._engine.record import Options
from reactivate._engine.region import module_called_by, run, run_module
from reactivate._engine.saved_functions import serve
from reactivate._in_graph import contexts_for
from reactivate._in_jax import is_traced, run_traced
from reactivate._torch.dynamo import NotTraced, checkpoint_in_graph
from reactivate._types import Guard, Policy
from reactivate.errors import UnsupportedError, UsageError
from reactivate.guards import DEFAULT, ContextPair

P = ParamSpec("P")
R = TypeVar("R")

Determinism = Literal["first", "metadata", "values", "none"]


@overload
def checkpoint(
    fn: Callable[P, R],
    *,
    policy: Policy | None = None,
    guards: Iterable[Guard] = DEFAULT,
    early_stop: bool = True,
    determinism: Determinism = "first",
    name: str | None = None,
) -> Callable[P, R]: ...


@overload
def checkpoint(
    *,
    policy: Policy | None = None,
    guards: Iterable[Guard] = DEFAULT,
    early_stop: bool = True,
    determinism: Determinism = "first",
    name: str | None = None,
) -> Callable[[Callable[P, R]], Callable[P, R]]: ...


def checkpoint(
    fn: Callable[..., Any] | None = None,
    *,
    policy: Policy | None = None,
    guards: Iterable[Guard] = DEFAULT,
    early_stop: bool = True,
    determinism: Determinism = "first",
    name: str | None = None,
) -> Any:
    """`fn`, recomputing in the backward what autograd would have kept from the forward pass.

    The result is called as `fn` is. What it computes is bitwise what `fn` computes: outputs, gradients, buffers, and the
    random numbers drawn afterwards. Between forward and backward it keeps its arguments and what its guards need (the
    state of a generator that it drew from, buffers that it wrote to), and no activation. Where nothing is
    differentiated (`torch.no_grad()`) it is `fn`.

    Args:
        fn: any callable: a function, a method, a `torch.nn.Module`, whose hooks then fire once. Without it, `checkpoint`
            returns a decorator.
        policy: which calls inside of `fn` to keep all the same; see `reactivate.policies`. Paths in it begin at `fn`, if
            that is a module or a method of one.
        guards: state that a replay must see as the forward pass saw it. Leave some out with `guards.DEFAULT.without(
            "rng")`, add your own with `guards.DEFAULT.adding(...)`.
        early_stop: end a replay as soon as nothing that it could still compute is needed.
        determinism: how far a recomputation is compared with its forward. "metadata": number, shape, dtype and device of
            the tensors that autograd saves. "first": that, and in the 1st, 2nd, 4th, 8th, ... call of a region checksums
            of saved tensors and outputs; such a recomputation runs to its end. "values": the result of every op, by a
            checksum; slow, it names the first op that differs. "none": only their number.
        name: what error messages and profiler traces call it; by default the name of `fn`.

    Returns:
        A function with the signature of `fn`.

    Raises:
        UsageError: an option has a value that it cannot have.

    When the result is called or differentiated:

        MutationError: something that the replay has to read was written to after the forward pass read it.
        ReplayMismatchError: `fn` did something else in the replay than in the forward pass.
        UnsupportedError: it is called under a torch transform that saved-tensor hooks do not work with.

    Source: Chen, Xu, Zhang, Guestrin, "Training Deep Nets with Sublinear Memory Cost", 2016.

    Example:
        >>> import torch, reactivate
        >>> block = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Linear(32, 8))
        >>> x = torch.randn(4, 8, requires_grad=True)
        >>> reactivate.checkpoint(block)(x).sum().backward()
        >>> x.grad.shape
        torch.Size([4, 8])
    """
    if fn is None:
        return functools.partial(
            checkpoint, policy=policy, guards=guards, early_stop=early_stop, determinism=determinism, name=name
        )
    options = make_options(guards, early_stop, determinism, name)
    return wrap(fn, options if policy is None else with_policy(options, fn, policy))


def make_options(guards: Iterable[Guard], early_stop: bool, determinism: Determinism, name: str | None) -> Options:
    """Checked options.

    Raises:
        UsageError: an option has a value that it cannot have.
    """
    if guards is DEFAULT and early_stop is True and determinism == "first" and name is None:
        return _DEFAULT_OPTIONS
    if determinism not in get_args(Determinism):
        allowed = ", ".join(map(repr, get_args(Determinism)))
        raise UsageError(f"determinism={determinism!r} is not a check. There are: {allowed}.")
    members = tuple(guards)
    for guard in members:
        if not isinstance(guard, Guard):
            raise UsageError(f"guards= takes guards; {guard!r} is none. Subclass reactivate.guards.Guard.")
    return Options(members, bool(early_stop), determinism, name)


_DEFAULT_OPTIONS = Options(tuple(DEFAULT))


def wrap(fn: Callable[..., Any], options: Options) -> Callable[..., Any]:
    """`fn` as a region with `options`.

    Raises:
        UsageError: `fn` cannot be called.
    """
    if not callable(fn):
        raise UsageError(f"checkpoint takes a function or a module; {fn!r} cannot be called.")
    module = module_called_by(fn)
    target: Any = fn if module is None else module
    runner = run if module is None else run_module

    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        if is_compiling():
            return run_in_graph(target, args, kwargs, options)
        if "torchax" in sys.modules and is_traced(target, args, kwargs):
            return run_traced(target, args, kwargs, options)
        return runner(target, args, kwargs, options)

    checkpointed.__wrapped__ = fn  # type: ignore[attr-defined]
    if type(fn) is FunctionType:  # as mostly, and for every call where the wrapper is built for each
        checkpointed.__name__, checkpointed.__qualname__ = fn.__name__, fn.__qualname__
        checkpointed.__module__, checkpointed.__doc__ = fn.__module__, fn.__doc__
    elif not isinstance(fn, Module):
        for attribute in ("__name__", "__qualname__", "__module__", "__doc__"):
            if hasattr(fn, attribute):
                setattr(checkpointed, attribute, getattr(fn, attribute))
    return checkpointed


def run_in_graph(fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any], options: Options) -> Any:
    """A region under torch.compile, which recomputes what is inside of it."""
    try:
        return checkpoint_in_graph(fn, args, kwargs, _context_fn_in_graph(options))
    except NotTraced:
        return (run_module if isinstance(fn, Module) else run)(fn, args, kwargs, options)


def with_policy(options: Options, fn: Any, policy: Policy) -> Options:
    """`options` with a policy for what is inside of the region.

    Raises:
        UsageError: `policy` is no policy.
    """
    if not callable(policy):
        raise UsageError(f"policy= takes a policy, a function of a site such as save_ops('linear'); got {policy!r}.")
    owner = fn if isinstance(fn, Module) else getattr(fn, "__self__", None)
    module = owner if isinstance(owner, Module) else None
    root = None if module is None else weakref.ref(module)
    choice = serve(Choice(policy, Unmatched(policy, "checkpoint"), root, "", is_applied=False))
    choice.find_modules()
    return options.of(options.name, choice, contexts_for(policy, root, ""))


def _context_fn_in_graph(options: Options) -> Any:
    """What torch.compile is to know of the options."""
    if options is _DEFAULT_OPTIONS:
        return None
    if options.in_graph is not None:
        return options.in_graph
    if options.determinism == "values":
        raise UnsupportedError('determinism="values" cannot be used under torch.compile: run the function without it.')
    pairs = [guard for guard in options.guards if isinstance(guard, ContextPair)]
    others = [guard for guard in options.guards if guard not in DEFAULT.members and guard not in pairs]
    if others or len(pairs) > 1:
        names = ", ".join(type(guard).__name__ for guard in others or pairs)
        raise UnsupportedError(
            f"These guards cannot be used under torch.compile: {names}. What runs in a compiled graph is recomputed by "
            "the compiler, which knows the random numbers and one pair of dispatch modes."
        )
    return pairs[0].make if pairs else None

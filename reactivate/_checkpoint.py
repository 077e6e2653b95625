"""`checkpoint`: a function or a module that keeps its inputs for backward, and nothing else."""

from __future__ import annotations

import copy
import functools
import inspect
import sys
from collections.abc import Callable, Iterable
from types import FunctionType, MethodType
from typing import Any, ParamSpec, TypeVar, overload

import torch
from torch.compiler import is_compiling
from torch.nn import Module

from reactivate._modules.view import view_of
from reactivate._options import DEFAULT_OPTIONS, CheckMode, make_options, with_policy
from reactivate._region.options import Options
from reactivate._region.run import runner_of
from reactivate._run import run_region
from reactivate._snapshot.kinds import asked_for
from reactivate._text.words import counted, described, did_you_mean, name_of
from reactivate._types import DEVICE, Guard, Policy, Storage
from reactivate.errors import UsageError
from reactivate.guards import DEFAULT

P = ParamSpec("P")
R = TypeVar("R")
M = TypeVar("M", bound=Module)


@overload
def checkpoint(
    fn: M,
    *,
    policy: Policy | None = None,
    inputs: Storage = DEVICE,
    guards: Iterable[Guard] = DEFAULT,
    early_stop: bool = True,
    check: CheckMode = "first",
    name: str | None = None,
) -> M: ...


@overload
def checkpoint(
    fn: Callable[P, R],
    *,
    policy: Policy | None = None,
    inputs: Storage = DEVICE,
    guards: Iterable[Guard] = DEFAULT,
    early_stop: bool = True,
    check: CheckMode = "first",
    name: str | None = None,
) -> Callable[P, R]: ...


@overload
def checkpoint(
    *,
    policy: Policy | None = None,
    inputs: Storage = DEVICE,
    guards: Iterable[Guard] = DEFAULT,
    early_stop: bool = True,
    check: CheckMode = "first",
    name: str | None = None,
) -> Callable[[Callable[P, R]], Callable[P, R]]: ...


def checkpoint(
    fn: Callable[..., Any] | None = None,
    *args: Any,
    policy: Policy | None = None,
    inputs: Storage = DEVICE,
    guards: Iterable[Guard] = DEFAULT,
    early_stop: bool = True,
    check: CheckMode = "first",
    name: str | None = None,
    **unknown: Any,
) -> Any:
    """Wrap `fn` so that its activations are recomputed in backward instead of stored.

    Call the result as you call `fn`. Outputs, gradients, buffers and the random numbers drawn afterwards are bitwise those of
    `fn`. Between forward and backward the region keeps its arguments and the state that its guards restore (the state of
    a random number generator, buffers that the forward wrote to), and no activation. Under `torch.no_grad()` the result
    does what `fn` does.

    A module gives a module: `self.block = checkpoint(Block())` registers it. It has the class, the parameters, the
    `state_dict` keys, the hooks and the `training` flag of the original, with which it shares them all; only its call is a
    region, and calls of the original stay plain. `copy.deepcopy` and `pickle` copy the original and checkpoint the copy.

    Args:
        fn: a function, a method or a `torch.nn.Module`, whose hooks fire once. Without it, `checkpoint` returns a
            decorator.
        policy: which calls inside of `fn` to save; see `reactivate.policies`. Paths begin at `fn`, if that is a module
            or a method of one.
        inputs: where to keep the tensors that `fn` is called with: `storage.Host()` for the memory of the host.
        guards: the state that a recomputation sees as the forward saw it. Leave some out with
            `guards.DEFAULT.without("rng")`, add your own with `guards.DEFAULT.adding(...)`.
        early_stop: stop a recomputation as soon as the last saved tensor that is needed exists.
        check: how recomputations are compared with their forwards. "metadata": number, shape, dtype and device of the
            saved tensors. "first": that, and in the 1st, 2nd, 4th, 8th, ... call of a region checksums of these, and of
            outputs where the recomputation comes to its end. "every": in every call, a checksum of the result of every op;
            slow, it names the first op that differs. "none": only the number of saved tensors.
        name: the name of the region in error messages and profiler traces; by default the name of `fn`.

    Returns:
        A module, if `fn` is one (but a function, if its class has `__slots__`); otherwise a
        function with the signature of `fn`, which pickles where `fn` does (since torch 2.13).

    Raises:
        UsageError: `fn` cannot be called, or an option has a value that it cannot have.

    When the result is called or differentiated:

        MutationError: a tensor that the recomputation reads was modified in place after the forward read it.
        RecomputeMismatchError: the recomputation differs from the forward.
        UnsupportedError: it is called under a torch transform that saved-tensor hooks do not work with.

    Source: Chen, Xu, Zhang, Guestrin, "Training Deep Nets with Sublinear Memory Cost", 2016.

    Examples:
        >>> import torch, reactivate
        >>> block = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Linear(32, 8))
        >>> x = torch.randn(4, 8, requires_grad=True)
        >>> reactivate.checkpoint(block)(x).sum().backward()
        >>> x.grad.shape
        torch.Size([4, 8])
    """
    if args or unknown:
        raise _refusal(fn, args, unknown)
    if fn is None:
        return functools.partial(
            checkpoint,
            policy=policy,
            inputs=inputs,
            guards=guards,
            early_stop=early_stop,
            check=check,
            name=name,
        )
    options = make_options(guards, early_stop, check, name, inputs)
    if options is DEFAULT_OPTIONS and policy is None:
        return wrap(fn, options, _DEFAULT_SETTINGS)
    given: dict[str, Any] = {"policy": policy, "early_stop": early_stop, "check": check, "name": name}
    if inputs is not DEVICE:
        given["inputs"] = inputs
    if guards is not DEFAULT:
        given["guards"] = options.guards
    return wrap(fn, options if policy is None else with_policy(options, fn, policy), given)


_DEFAULT_SETTINGS: dict[str, Any] = {}

_TORCHS = {
    "use_reentrant": lambda value: "leave out use_reentrant: there is one engine, without the reentrant limits",
    "preserve_rng_state": lambda value: (
        "leave out preserve_rng_state: random numbers are restored"
        if value
        else 'write guards=reactivate.guards.DEFAULT.without("rng")'
    ),
    "determinism": lambda value: f'write check="{"every" if value == "values" else value}"',
    "determinism_check": lambda value: f'write check="{"none" if value == "none" else "metadata"}"',
    "debug": lambda value: 'write check="every"' if value else "leave out debug",
    "context_fn": lambda value: (
        "write guards=reactivate.guards.DEFAULT.adding(reactivate.guards.ContextPair(context_fn)), or for selective "
        'checkpointing policy=reactivate.policies.save_ops("linear", ...)'
    ),
}
"""What to write in the place of torch's options, and of older ones of ours."""


def _refusal(fn: Any, args: tuple[Any, ...], unknown: dict[str, Any]) -> UsageError:
    """Return the error about a call in another style: torch's, mostly."""
    known = [name for name, item in inspect.signature(checkpoint).parameters.items() if item.kind is item.KEYWORD_ONLY]
    remedies = [_TORCHS[name](value) for name, value in unknown.items() if name in _TORCHS]
    others = [name for name in unknown if name not in _TORCHS]
    call = f"the result takes the arguments of the function: write checkpoint({name_of(fn)})(...)"
    if args or (others and not any(did_you_mean(name, known) for name in others)):
        remedies.insert(0, call)
    found = counted(len(args), "more positional argument") if args else ""
    given = " and ".join(filter(None, (found, ", ".join(f"{name}=" for name in unknown))))
    hints = "".join(did_you_mean(name, known) for name in others)
    torchs = (
        " The call in torch's style is reactivate.dropin.torch.checkpoint(f, x, use_reentrant=False)."
        if args or len(others) < len(unknown)
        else ""
    )
    said = f" {'; '.join(remedies)}." if remedies else f" Its options are {', '.join(known)}."
    return UsageError(
        f"checkpoint takes one function and its own options; got {given}.{hints}{_capitalized(said)}{torchs}"
    )


def _capitalized(sentence: str) -> str:
    return sentence[:1] + sentence[1:2].upper() + sentence[2:]


class CheckpointedFunction(functools.partial[Any]):
    """A function that is a region, with the name, the signature and the documentation of the function it wraps.

    Attributes:
        __wrapped__: the function.
        settings: the keyword arguments of `checkpoint`, without those that were not given.
    """

    settings: dict[str, Any]
    __wrapped__: Any
    __qualname__: str

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        if instance is None:
            return self
        return functools.partial(self, instance) if is_compiling() else MethodType(self, instance)

    def __repr__(self) -> str:
        return f"<checkpointed {self.__wrapped__!r}>"

    def __reduce__(self) -> Any:
        if _is_found_by_name(self):
            return self.__qualname__
        return _restored, (self.__wrapped__, self.settings)

    def __copy__(self) -> Any:
        return self if type(self.__wrapped__) is FunctionType else _restored(copy.copy(self.__wrapped__), self.settings)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        fn = copy.deepcopy(self.__wrapped__, memo)
        return self if fn is self.__wrapped__ else _restored(fn, self.settings)


def _is_found_by_name(fn: Any) -> bool:
    """Return whether `fn` has taken the place of the function that it wraps, as a decorator does."""
    found: Any = sys.modules.get(asked_for(fn, "__module__") or "")
    for name in (asked_for(fn, "__qualname__") or "").split("."):
        found = getattr(found, name, None)
    return found is fn


def _restored(fn: Any, settings: dict[str, Any]) -> Any:
    return checkpoint(fn, **settings)


def wrap(fn: Callable[..., Any], options: Options, settings: dict[str, Any]) -> Any:
    """Return `fn` as a region: a view of it, if it is a module.

    Args:
        settings: the arguments of `checkpoint` that made these options, for copies.

    Raises:
        UsageError: `fn` cannot be called.
    """
    if not callable(fn):
        raise UsageError(
            f"checkpoint takes a function or a module; {described(fn)} cannot be called. Call what checkpoint returns: "
            "checkpoint(f)(x)."
        )
    if isinstance(fn, type) and issubclass(fn, Module):
        raise UsageError(
            f"checkpoint takes a module, and {fn.__name__} is its class: write checkpoint({fn.__name__}(...))."
        )
    runner, called = runner_of(fn)
    call: Any = run_region, runner, options, called
    if is_compiling():  # dynamo makes no objects of other classes while it traces
        return functools.partial(*call)
    region: Any = CheckpointedFunction(*call) if isinstance(fn, Module) or _dynamo_knows_partials else _function(call)
    region.settings = settings
    region.__wrapped__ = fn
    if type(fn) is FunctionType:  # as mostly, and for every call where the wrapper is built for each
        region.__name__, region.__qualname__ = fn.__name__, fn.__qualname__
        region.__module__, region.__doc__ = fn.__module__, fn.__doc__
        return region
    if isinstance(fn, Module):
        view = view_of(fn, region)
        return region if view is None else view
    for attribute in ("__name__", "__qualname__", "__module__", "__doc__"):
        if (value := asked_for(fn, attribute)) is not None:
            setattr(region, attribute, value)
    return region


# Before, dynamo does not call an object of a class that has `__get__` where it is an attribute of a module.
_dynamo_knows_partials = torch.__version__ >= (2, 13)  # type: ignore[operator]


def _function(call: Any) -> Any:
    _, *region = call

    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        return run_region(*region, *args, **kwargs)

    return checkpointed

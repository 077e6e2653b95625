"""Calls of checkpointed functions: where a region begins and ends."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import is_grad_enabled
from torch.nn import Module

from reactivate._modules.standin import StandIn
from reactivate._passes.logs import log_of_calls, set_aside
from reactivate._passes.observing import are_regions_off
from reactivate._passes.places import calls_regions
from reactivate._region.options import Options
from reactivate._region.region import Region
from reactivate._region.transforms import refuse_transform_inside
from reactivate._snapshot.kinds import owner_of_method
from reactivate._torch.dynamo import is_jit_tracing, leave_to_eager
from reactivate._torch.modules import has_hooks, module_call

Runner = Callable[[Any, tuple[Any, ...], dict[str, Any], Options], Any]


def run(fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any], options: Options) -> Any:
    """Call `fn(*args, **kwargs)`, keeping of it what its recomputations need and no more."""
    if not is_grad_enabled() or are_regions_off() or is_jit_tracing():  # Rule 3
        return fn(*args, **kwargs)
    if log_of_calls.get() is not None:  # calls inside of this region are not those of a region around it
        with set_aside():
            return run(fn, args, kwargs, options)
    region = Region()
    try:  # around all of it: an interrupt may come at any moment
        plainly = region.begin(fn, args, kwargs, options)
        if plainly is None:
            return region.end(fn(*args, **kwargs))
    except BaseException as error:
        region.fail(error)
        refuse_transform_inside(error)
        raise
    return plainly(fn, args, kwargs)


leave_to_eager(run.__code__)
calls_regions(run.__code__)


def run_module(module: Module, args: tuple[Any, ...], kwargs: dict[str, Any], options: Options) -> Any:
    """Run a module with the region inside of its hooks, so that these run once (Rule 21)."""
    if not has_hooks(module) or not is_grad_enabled():
        return run(module, args, kwargs, options)
    try:
        StandIn.enter(module, functools.partial(run, options=options))
        return module(*args, **kwargs)
    finally:
        StandIn.leave_any(module)


def runner_of(fn: Any) -> tuple[Runner, Any]:
    """Return the runner of a region, and the function or, if the region is the `__call__` of a module, that."""
    if isinstance(fn, Module):
        return (run_module if type(fn).__call__ is module_call else run), fn
    owner = owner_of_method(fn)
    return (run_module, owner) if isinstance(owner, Module) and fn == owner.__call__ else (run, fn)

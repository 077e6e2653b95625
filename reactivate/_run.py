"""The one dispatch of a region's call: into a graph of torch.compile or AOTAutograd, or to the engine.

Fake tensors, dispatch modes and transforms of `torch.func` are the engine's own affair: there is a call to run.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import is_grad_enabled
from torch.compiler import is_compiling

from reactivate._backends import backends
from reactivate._compilers.aot import run_tagged
from reactivate._options import contexts_in_graph
from reactivate._region.options import Options
from reactivate._region.run import Runner
from reactivate._snapshot.call import Call
from reactivate._torch.dynamo import NotTraced, checkpoint_in_graph, runs_while_traced
from reactivate._torch.modes import is_aot_tracing, is_dispatch_mode_active
from reactivate._torch.ops import tensors_in
from reactivate.errors import UnsupportedError


def run_region(runner: Runner, options: Options, fn: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Call `fn(*args, **kwargs)` as a region.

    Args:
        runner: the part of the engine that runs it in eager mode.
    """
    if is_compiling():
        _register_devices()
        try:
            return checkpoint_in_graph(fn, args, kwargs, contexts_in_graph(options))
        except NotTraced:
            return runner(fn, args, kwargs, options)
    if is_dispatch_mode_active() or "torchax" in sys.modules:
        return run_untraced(runner, options, fn, args, kwargs)
    return runner(fn, args, kwargs, options)


def run_untraced(runner: Runner, options: Options, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call `fn(*args, **kwargs)` as a region that dynamo does not trace."""
    if is_aot_tracing():
        return run_tagged(fn, args, kwargs, options, contexts_in_graph(options))
    if "torchax" in sys.modules and is_grad_enabled():
        _refuse_torchax(fn, args, kwargs)
    return runner(fn, args, kwargs, options)


def _refuse_torchax(fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise if a call reaches tensors of torchax: under `jax.jit` torch's autograd keeps nothing that could be dropped."""
    call = Call(fn, args, kwargs)
    parameters = (tensor for module in call.modules for tensor in module.parameters(recurse=False))
    found = (*tensors_in(args, kwargs), *call.reached(), *parameters)
    if any(type(tensor).__module__.startswith("torchax.") for tensor in found):
        raise UnsupportedError(
            "A checkpointed region was given tensors of torchax, which are not supported: JAX differentiates what torchax "
            "runs under jax.jit, and decides what is kept. Use jax.checkpoint around the function there."
        )


@runs_while_traced
def _register_devices() -> bool:
    """Register the modules of devices that came without one, which torch's function in the graph asks for."""
    return bool(backends())

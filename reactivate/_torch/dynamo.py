"""Compilers of torch's: what torch.compile is not to compile and regions inside of what it does, inductor, TorchScript."""

from __future__ import annotations

import contextlib
import functools
import sys
import warnings
from collections.abc import Callable, Mapping
from types import CodeType, GeneratorType
from typing import Any, TypeVar

import torch
import torch.utils.checkpoint
from torch.nn import Module
from torch.utils._python_dispatch import TorchDispatchMode

from reactivate._torch.autograd import pop_saved_tensor_hooks, push_saved_tensor_hooks, same
from reactivate._torch.modes import is_tracing
from reactivate._torch.private_api import Replaced, find, is_missing, resolve_private

_F = TypeVar("_F", bound=Callable[..., Any])

# -- what is not compiled ---------------------------------------------------------------------------------------------

_set_strategy, _Strategy, _Action = resolve_private(
    "excluding code from torch.compile",
    "torch._C._dynamo.eval_frame.set_code_exec_strategy",
    "torch._C._dynamo.eval_frame._FrameExecStrategy",
    "torch._C._dynamo.eval_frame._FrameAction",
    probe=lambda put, kind, action: put((lambda: None).__code__, kind(action.SKIP, action.SKIP)) is None,
    lost="the exclusion of regions from torch.compile: it may compile parts of them, and a warning says so",
)
# With `False`: of the compiled versions of a function that fit a call, take the oldest, not the one used last. So a
# recomputation takes the version that its forward pass took, also if others were compiled or used in between.
prefer_version_used_last: Callable[[bool], Any] = resolve_private(
    "choosing the oldest compiled version that fits",
    "torch._C._dynamo.eval_frame._set_lru_cache",
    without=lambda is_on: None,  # as in torch 2.9
    lost="a recomputation may use another compiled version of a function that fits",
)


def leave_to_eager(code: CodeType) -> None:
    """Let torch.compile compile neither frames with this code nor what they call.

    A region that a graph break left to eager would otherwise have a forward pass made of compiled pieces and a recomputation
    that is not. (`torch._dynamo.disable` wraps, and costs 10 us a call.)
    """
    if is_missing(_set_strategy):
        _warn_of_compiled_regions()
    else:
        _set_strategy(code, _Strategy(_Action.SKIP, _Action.SKIP))


class DispatchMode(TorchDispatchMode):
    """A mode that is told of ops, and that torch.compile leaves to eager.

    torch wraps the methods of other modes for that: the first op that one is told of imports torch._dynamo, which takes
    seconds, and each op takes longer.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return is_missing(_set_strategy)

    def __init_subclass__(cls, **options: Any) -> None:
        own = vars(cls).get("__torch_dispatch__")
        super().__init_subclass__(**options)
        if own is not None and not is_missing(_set_strategy):
            leave_to_eager(own.__code__)


@functools.cache
def _warn_of_compiled_regions() -> None:
    warnings.warn(
        "With this torch, reactivate cannot keep torch.compile from compiling parts of a region that it left to eager. "
        "Compile nothing that has checkpointed regions in it, or install a newer reactivate.",
        stacklevel=2,
    )


def leave_out_of_graphs(function: Any, reason: str = "a recomputation runs as its forward pass did") -> None:
    """`leave_to_eager`, also where a traced function calls this one: the graph ends before the call.

    Compiled autograd traces saved-tensor hooks, and a compiled recomputation saves other tensors than its forward pass.
    """
    leave_to_eager(function.__code__)
    function._torchdynamo_disable = True
    function._torchdynamo_disable_msg = reason


def runs_while_traced(function: _F) -> _F:
    """Let torch.compile call `function` where it traces a call of it, as `torch.compiler.assume_constant_result` does.

    That one imports torch._dynamo, which takes seconds.
    """
    function._dynamo_marked_constant = True
    return function


# -- regions in a graph -----------------------------------------------------------------------------------------------

_WRAP = "torch._higher_order_ops.wrap"
# Where the traced graph is not compiled further but run as it is (`backend="eager"`), torch checkpoints it with its own
# engine and without random states: gradients would be wrong. There the region keeps its activations. (torch < 2.12 does
# that by itself.)
_recompute_everything: Any = getattr(find(_WRAP), "_always_prefer_recompute", None)


class NotTraced(Exception):
    """torch.compile has left a region to eager: it was to be traced, and runs."""


def checkpoint_in_graph(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], context_fn: Any = None
) -> Any:
    """The region for torch.compile, which traces this: the operator that its partitioner recomputes the inside of.

    Dynamo knows `torch.utils.checkpoint.checkpoint` by its identity, and only that.

    Raises:
        NotTraced: the function could not be traced, so torch.compile calls this in eager.
    """

    def body(*inner: Any) -> Any:
        if not torch.compiler.is_compiling():
            raise NotTraced
        return fn(*inner, **kwargs)

    contexts: dict[str, Any] = {}
    if context_fn is not None:
        contexts["context_fn"] = functools.partial(_contexts_in_graph, context_fn)
    elif _recompute_everything is not None:
        contexts["context_fn"] = _contexts_by_default
    try:
        return torch.utils.checkpoint.checkpoint(body, *args, use_reentrant=False, **contexts)
    except NotTraced:
        pass  # torch's hooks go with this error, whose traceback has them
    raise NotTraced


def runs_as_traced(function: Callable[..., Any]) -> bool:
    """Return whether `function` is the inside of a traced region, which torch is running as it was traced."""
    return function.__module__ == _WRAP and not is_tracing()


def warn_of_running_as_traced() -> None:
    """Say that a region is not recomputed, and why."""
    warnings.warn(
        'A checkpointed region is in a graph that torch.compile runs as it was traced (backend="eager"). It keeps its '
        'activations: only a backend that compiles the backward ("aot_eager", "inductor") recomputes.',
        stacklevel=2,
    )


def _contexts_in_graph(context_fn: Callable[[], Any]) -> Any:
    """Return the contexts for the forward pass and for the recomputation of a traced region."""
    if is_tracing():
        return context_fn()
    warn_of_running_as_traced()
    return _KeepEverything(), contextlib.nullcontext()


def _contexts_by_default() -> Any:
    return _contexts_in_graph(
        lambda: torch.utils.checkpoint.create_selective_checkpoint_contexts(_recompute_everything)
    )


_contexts_by_default.cache_hash = "reactivate: recompute everything"


class _KeepEverything(contextlib.AbstractContextManager[None]):
    """Autograd keeps what it saves, also inside of saved-tensor hooks that would not."""

    ac_graph_id: int | None = None

    def __enter__(self) -> None:
        push_saved_tensor_hooks(same, same)

    def __exit__(self, *error: object) -> None:
        pop_saved_tensor_hooks()


SITE = "reactivate.site"
names_reach_graphs: bool = hasattr(torch.fx.traceback, "annotate")  # since torch 2.10


def named_in_graph(name: str, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """A call that torch.compile traces, named for policies."""
    if not names_reach_graphs:
        return fn(*args, **kwargs)
    with torch.fx.traceback.annotate({SITE: name}):
        return fn(*args, **kwargs)


def node_being_traced() -> Any:
    """Return what Dynamo knows of the call that the op being traced comes from."""
    return torch.fx.traceback.get_current_meta()


# -- what is compiled in place ----------------------------------------------------------------------------------------

_IN_PLACE = "_compiled_call_impl"  # where `Module.compile` puts what takes the place of a module's call


def compiled_call_of(module: Module) -> Callable[..., Any] | None:
    """Return what stands in the place of the module's call since `module.compile()`; None if nothing does."""
    found: Callable[..., Any] | None = getattr(module, _IN_PLACE, None)
    return found


def own_call_of(module: Module) -> Callable[..., Any]:
    """Return the module's call as it is without `module.compile()`, hooks and all."""
    return module._call_impl  # type: ignore[no-any-return]


def called_through(calls: Mapping[Module, Callable[..., Any]]) -> Replaced:
    """Return a context in which something is in the place of the calls of modules."""
    return Replaced(lambda: [(module, _IN_PLACE, call) for module, call in calls.items()])


def is_wrapped_by_compiler(module: Module) -> bool:
    """Return whether a module is the wrapper that `torch.compile(module)` returns."""
    return _WRAPPED in module._modules


_WRAPPED = "_orig_mod"


def compiled_function(function: Any) -> Any:
    """Return the function that `torch.compile`, or `torch.compiler.disable`, made this one of; None if none did."""
    return getattr(function, "__dict__", {}).get("_torchdynamo_orig_callable")


def is_compiled_function(function: Any) -> bool:
    """Return whether `torch.compile` made this function."""
    return compiled_function(function) is not None and not getattr(function, "_torchdynamo_disable", False)


def is_loaded() -> bool:
    """Return whether torch has loaded what compiles functions, which takes it a second."""
    return "torch._dynamo" in sys.modules


@functools.cache
def begin_of_compiled_call() -> Any:
    """Return the function that torch calls, with what compiles, when a call of a compiled function begins."""
    return find("torch._dynamo.eval_frame._callback_from_stance")


def callback_of(function: Any) -> Any:
    """Return what `begin_of_compiled_call` is called with when this compiled function is; None if that is not to be seen."""
    names, cells = function.__code__.co_freevars, function.__closure__
    return cells[names.index("callback")].cell_contents if "callback" in names else None


def with_many_graphs(count: int) -> contextlib.AbstractContextManager[None]:
    """Return a context in which torch.compile makes up to so many graphs of one function before it leaves it to eager."""
    config = find("torch._dynamo.config")
    return config.patch(recompile_limit=max(count, config.recompile_limit))  # type: ignore[no-any-return]


# -- what is kept of a graph ------------------------------------------------------------------------------------------

has_budgets_in_graphs: bool = hasattr(torch.autograd.graph, "region_activation_memory_budget")  # since torch 2.13


def budget_in_graph(share: float) -> contextlib.AbstractContextManager[None]:
    """Return a context, for torch.compile to trace, in which the partitioner keeps this share of what it would keep."""
    return torch.autograd.graph.region_activation_memory_budget(share)


# -- code that inductor compiled, shown as one op ---------------------------------------------------------------------

COMPILED_CODE = "inductor_compiled_code"
_FLAG = "_is_in_torch_dispatch_mode"


def _reads_flag(is_active: Any) -> bool:
    names, seen = is_active.__globals__, []
    before = names[_FLAG]
    for value in (True, False, before):
        names[_FLAG] = value
        seen.append(is_active())
    return seen[:2] == [True, False]


_is_active = resolve_private(
    "compiled code as one op",
    "torch.utils._python_dispatch.is_in_torch_dispatch_mode",
    probe=_reads_flag,
    without=lambda: None,  # an older torch has no such op
    lost="policies that save compiled code: it is recomputed",
)
# With inductor's option `wrap_inductor_compiled_regions` compiled code calls itself through an op, but only where torch
# notes that a dispatch mode is active. A region with a policy has a function mode, which costs less and sees that op as
# well; so the note is set for as long as such a region runs. Nothing else in torch reads it.
compiled_code_is_shown = Replaced(
    lambda: [(find("torch.utils._python_dispatch"), _FLAG, True)] if _FLAG in _is_active.__globals__ else []
)

# -- TorchScript ------------------------------------------------------------------------------------------------------

# The graph that TorchScript's interpreter ran last on this thread, None if it never did: 0.05 us.
last_script_graph: Callable[[], Any] = resolve_private(
    "the scripted function that ran last",
    "torch._C._last_executed_optimized_graph",
    probe=lambda ask: ask() is ask(),
    without=lambda: None,
    lost="the first call of a scripted function raises if reactivate cannot find that function in the code",
)
# How many calls TorchScript watches before it compiles.
count_of_profiled_runs: Callable[[], int] = resolve_private(
    "the number of calls that TorchScript profiles",
    "torch._C._jit_get_num_profiled_runs",
    lost="regions with scripted functions",
)


def is_profiling_graph(graph: Any) -> bool:
    """Return whether TorchScript ran `graph` to see what to compile, and will run another one next time."""
    return any(node.kind() == "prim::profile" for node in graph.nodes())


is_jit_tracing: Callable[[], bool] = torch.jit.is_tracing  # type: ignore[attr-defined]
"""Return whether `torch.jit.trace` records what runs: sizes are tensors then."""


def is_compiled_script(script: Any) -> bool:
    """Return whether a scripted function or module has been called often enough to be compiled."""
    try:
        script.get_debug_state()
    except RuntimeError:
        return False
    return True


# -- torch's own checkpoint -------------------------------------------------------------------------------------------


_Context = contextlib._GeneratorContextManager
_CONTEXT_CODES = _Context.__enter__.__code__, _Context.__exit__.__code__


def close_checkpoints_within(error: BaseException) -> None:
    """Close what calls of torch's checkpoint have opened that an error went through, the innermost first.

    torch 2.9 and 2.11 leave saved-tensor hooks and modes to a generator that is not closed before the traceback is collected:
    until then the hooks stay, and then those go that are innermost by that time, of any owner.
    An interrupt in the beginning or the end of any `contextlib.contextmanager` does the same: torch makes a call of one of
    its functions within such a one, which puts a function mode back.

    Args:
        error: as it arrives at a caller of ours. Calls outside of that caller are not in its traceback yet.
    """
    trace, frames = error.__traceback__, []
    while trace is not None:
        frames.append(trace.tb_frame)
        trace = trace.tb_next
    for frame in reversed(frames):
        if frame.f_code.co_filename == torch.utils.checkpoint.__file__:
            for value in frame.f_locals.values():
                if isinstance(value, GeneratorType):
                    value.close()
        elif frame.f_code in _CONTEXT_CODES and not frame.f_locals["self"].gen.gi_running:
            frame.f_locals["self"].gen.close()

"""torch.compile: what it is not to compile, and regions inside of what it does."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable
from types import CodeType
from typing import Any, TypeVar

import torch
import torch.utils.checkpoint

from reactivate._torch.autograd import pop_saved_tensor_hooks, push_saved_tensor_hooks, same
from reactivate._torch.modes import is_tracing
from reactivate._torch.ways import fastest, find, is_missing

_F = TypeVar("_F", bound=Callable[..., Any])

_WRAP = "torch._higher_order_ops.wrap"


def _is_strategy(put: Any, strategy: Any, action: Any) -> bool:
    put((lambda: None).__code__, strategy(action.SKIP, action.SKIP))
    return True


_set_strategy, _Strategy, _Action = fastest(
    "excluding code from torch.compile",
    "torch._C._dynamo.eval_frame.set_code_exec_strategy",
    "torch._C._dynamo.eval_frame._FrameExecStrategy",
    "torch._C._dynamo.eval_frame._FrameAction",
    probe=_is_strategy,
    lost="the exclusion of regions from torch.compile: it may compile parts of them, and a warning says so",
)


def leave_to_eager(code: CodeType) -> None:
    """Let torch.compile compile neither frames with this code nor what they call.

    A region that a graph break left to eager would otherwise have a forward pass made of compiled pieces and a recomputation
    that is not. (`torch._dynamo.disable` wraps, and costs 10 us a call.)
    """
    if is_missing(_set_strategy):
        _warn_of_compiled_regions()
        return
    _set_strategy(code, _Strategy(_Action.SKIP, _Action.SKIP))


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
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def _prefer_nothing(is_on: bool) -> None:
    """torch 2.9 has no such switch."""


# With `False`: of the compiled versions of a function that fit a call, take the oldest, not the one used last. So a
# recomputation takes the version that its forward pass took, also if others were compiled or used in between.
prefer_version_used_last: Callable[[bool], None] = fastest(
    "choosing the oldest compiled version that fits",
    "torch._C._dynamo.eval_frame._set_lru_cache",
    probe=callable,  # there is no question for what it was before
    without=_prefer_nothing,
    lost="a recomputation may use another compiled version of a function that fits",
)


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


def named_in_graph(name: str, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """A call that torch.compile traces, named for policies."""
    if not names_reach_graphs:
        return fn(*args, **kwargs)
    with torch.fx.traceback.annotate({SITE: name}):
        return fn(*args, **kwargs)


SITE = "reactivate.site"
names_reach_graphs: bool = hasattr(torch.fx.traceback, "annotate")  # since torch 2.10


def node_being_traced() -> Any:
    """Return what Dynamo knows of the call that the op being traced comes from."""
    return torch.fx.traceback.get_current_meta()


# Where the traced graph is not compiled further but run as it is (`backend="eager"`), torch checkpoints it with its own
# engine and without random states: gradients would be wrong. There the region keeps its activations. (torch < 2.12 does
# that by itself.)
_recompute_everything: Any = getattr(find(_WRAP), "_always_prefer_recompute", None)


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
    return _contexts_in_graph(_recompute_everything_contexts)


def _recompute_everything_contexts() -> Any:
    return torch.utils.checkpoint.create_selective_checkpoint_contexts(_recompute_everything)


_contexts_by_default.cache_hash = "reactivate: recompute everything"  # type: ignore[attr-defined]


class _KeepEverything(contextlib.AbstractContextManager[None]):
    """Autograd keeps what it saves, also inside of saved-tensor hooks that would not."""

    ac_graph_id: int | None = None

    def __enter__(self) -> None:
        push_saved_tensor_hooks(same, same)

    def __exit__(self, *error: object) -> None:
        pop_saved_tensor_hooks()

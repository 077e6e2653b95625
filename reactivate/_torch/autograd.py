"""Autograd: saved-tensor hooks, the backward that runs, nodes and their numbers, custom functions."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import CodeType
from typing import Any, TypeVar

import torch
import torch.utils.checkpoint
from torch.autograd.graph import saved_tensors_hooks

from reactivate._torch.ways import fastest

# -- saved-tensor hooks -----------------------------------------------------------------------------------------------


def same(tensor: torch.Tensor) -> torch.Tensor:
    """Hook: keep it as it is."""
    return tensor


_any_hooks = saved_tensors_hooks(same, same)


def _push(pack: Any, unpack: Any) -> None:
    saved_tensors_hooks(pack, unpack).__enter__()


def _pop() -> None:
    _any_hooks.__exit__()  # whichever are innermost


def _are_hooks(push: Any, pop: Any) -> bool:
    seen: list[torch.Tensor] = []
    x = torch.ones(1, device="cpu", requires_grad=True)

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        seen.append(tensor)
        return tensor

    push(pack, same)
    try:
        x.exp()
    finally:
        pop()
    x.exp()
    return len(seen) == 1


# `torch.autograd.graph.saved_tensors_hooks` builds an object a region and costs 1 us more.
push_saved_tensor_hooks, pop_saved_tensor_hooks = fastest(
    "installing saved-tensor hooks without a context object",
    "torch._C._autograd._push_saved_tensors_default_hooks",
    "torch._C._autograd._pop_saved_tensors_default_hooks",
    probe=_are_hooks,
    public=(_push, _pop),
)


def _is_innermost(top: Any) -> bool:
    with saved_tensors_hooks(same, same):
        return top(True)[0] is same  # type: ignore[no-any-return]


_top_saved_tensor_hooks = fastest(
    "detecting saved-tensor hooks around a call",
    "torch._C._autograd._top_saved_tensors_default_hooks",
    probe=_is_innermost,
    lost="every region",
)


def innermost_pack_hook() -> Any:
    """The pack hook that autograd would call now, or None."""
    hooks = _top_saved_tensor_hooks(True)
    return None if hooks is None else hooks[0]


# torch's selective checkpointing (>= 2.14) may pass what it keeps through the saved-tensor hooks of the user's around it.
# It asks the innermost pack hook which these are, by two attributes; a hook without them it takes for one of the user's.
_find_users_hooks: Any = getattr(torch.utils.checkpoint, "_current_user_saved_tensors_hooks", None)
asks_for_users_hooks: bool = _find_users_hooks is not None
_Hook = TypeVar("_Hook", bound=Callable[..., Any])


def not_a_users_hook(pack: _Hook) -> _Hook:
    """Mark a pack hook: what selective checkpointing keeps is not for it."""
    marked: Any = pack
    marked._checkpoint_internal, marked._user_hooks = True, None
    return pack


def users_hooks() -> tuple[Any, Any] | None:
    """Return the (pack, unpack) hooks of the user's that are around the caller, None if there are none.

    A marked hook has an owner that knows those around it, as `users_hooks`. torch's checkpoint has hooks for its own use.
    """
    hooks = _top_saved_tensor_hooks(True)
    if hooks is None:
        return None
    pack: Any = hooks[0]
    if getattr(pack, "_checkpoint_internal", False):
        found: tuple[Any, Any] | None = getattr(
            getattr(getattr(pack, "func", pack), "__self__", None), "users_hooks", None
        )
        return found
    return None if is_of_checkpointing(pack) else (pack, hooks[1])


def is_of_checkpointing(pack: Any) -> bool:
    """Return whether a pack hook is a region's, or that of torch's checkpoint: what it is given is not kept."""
    return getattr(pack, "_checkpoint_internal", False) or getattr(pack, "__module__", None) == "torch.utils.checkpoint"


def beside_users_hooks(pack: Any) -> Any:
    """Return a marked pack hook that also says which hooks of the user's are around it."""
    if _top_saved_tensor_hooks(True) is None:
        return pack
    hook: Any = not_a_users_hook(functools.partial(pack))  # which has no Python frame of its own
    hook._user_hooks = _find_users_hooks()
    return hook


def forget_users_hooks() -> None:
    """Let the innermost hook forget the user's: it is done, but graphs hold it, and no collector sees cycles through it."""
    hook = innermost_pack_hook()
    if getattr(hook, "_user_hooks", None) is not None:
        hook._user_hooks = None


# -- modes ------------------------------------------------------------------------------------------------------------


def _sets_grad_mode(put: Any) -> bool:
    before = torch.is_grad_enabled()
    try:
        put(not before)
        return torch.is_grad_enabled() is not before
    finally:
        put(before)


def _set_grad_enabled(is_on: bool) -> None:
    torch.set_grad_enabled(is_on)


# `torch.enable_grad()` and back: without an object in between.
set_grad_enabled: Callable[[bool], None] = fastest(
    "setting grad mode directly", "torch._C._set_grad_enabled", probe=_sets_grad_mode, public=_set_grad_enabled
)


def is_forward_mode_active() -> bool:
    """Return whether a context of `forward_ad.dual_level` is open."""
    return torch.autograd.forward_ad._current_level >= 0


# Whether a profiler is on: `record_function` costs 5 us even when nobody listens.
is_profiling: Callable[[], bool] = fastest(
    "detecting a profiler",
    "torch.autograd._profiler_enabled",
    probe=lambda ask: ask() in (True, False),
    public=lambda: True,
)

# -- the backward that runs -------------------------------------------------------------------------------------------


# The number of the backward running on this thread, -1 for none: whether a recomputation has a backward to live as long as.
current_backward: Callable[[], int] = fastest(
    "detecting a running backward",
    "torch._C._current_graph_task_id",
    probe=lambda ask: ask() == -1,
    lost="every backward through a region",
)


def _is_for_backwards(queue: Any) -> bool:
    try:
        queue(lambda: None)
    except RuntimeError:  # there is none now, and to run one would start threads
        return True
    return False


# Calls a function when the backward that runs on this thread has finished without an error.
on_backward_end: Callable[[Callable[[], None]], None] = fastest(
    "a callback at the end of a backward",
    "torch.autograd.Variable._execution_engine.queue_callback",
    probe=_is_for_backwards,
    lost="every backward through a region that saves more than one tensor",
)

# The node whose backward runs on this thread, None if no backward does.
current_node: Callable[[], Any] = fastest(
    "the autograd node that is running",
    "torch._C._current_autograd_node",
    probe=lambda ask: ask() is None,
    lost="backwards through custom functions inside of regions, and plans",
)


def is_function_running() -> bool:
    """Return whether the backward of a custom `torch.autograd.Function` runs on this thread."""
    return isinstance(current_node(), torch.autograd.function.BackwardCFunction)


def _counts_nodes(ask: Any) -> bool:
    before = ask()
    y = torch.ones(1, device="cpu", requires_grad=True).exp()
    return before < ask() and y.grad_fn is not None


# Autograd numbers its nodes in the order in which they are made: that tells where in the forward pass a node belongs.
next_node_number: Callable[[], int] = fastest(
    "the sequence number of the next autograd node",
    "torch.autograd._get_sequence_nr",
    probe=_counts_nodes,
    lost="regions that save tensors without a gradient, policies that save functions, and plans",
)


def current_node_number() -> int | None:
    """The number of the node whose backward runs on this thread; -1 if it has none; None if no backward runs."""
    node = current_node()
    if node is None:
        return None
    number = int(node._sequence_nr())
    return number if number < 2**63 else -1


# -- custom functions -------------------------------------------------------------------------------------------------

# Python frames of `torch.autograd.Function.apply`: what it saves may be read more than once in a backward. None where that
# is written in C (torch >= 2.14).
FUNCTION_APPLY_CODE: CodeType | None
FUNCTION_APPLY_CODE = getattr(getattr(torch.autograd.Function.apply, "__func__", None), "__code__", None)


def _is_off_in_functions(ask: Any) -> bool:
    seen: list[bool] = []

    class Look(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            seen.append(ask())
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            return gradients

    Look.apply(torch.ones(1, device="cpu", requires_grad=True))
    return ask() and seen == [False]


# Whether forward-mode AD may take part. Autograd turns it off for the `forward` of a custom function, and on again before
# it saves what that function asked for; `torch.enable_grad` does not turn it on. So it says whether such a `forward` runs,
# also where `Function.apply` is written in C and leaves no frame.
is_outside_of_functions: Callable[[], bool] = fastest(
    "detecting a running forward of a custom function",
    "torch._C._is_fwd_grad_enabled",
    probe=_is_off_in_functions,
    lost="every backward through a region",
)


def has_setup_context(kind: type[torch.autograd.Function]) -> bool:
    """Return whether the context is filled in a function of its own, and `forward` does not get it."""
    return kind.setup_context is not torch.autograd.function._SingleLevelFunction.setup_context


_NO_WAY_BACK = "A backward inside of a checkpointed region went through a call that its recomputation skips."


@functools.cache
def _without_way_back() -> Any:
    return torch._C._functions.DelayedError(_NO_WAY_BACK, 1)


def give_back(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` as the result of an op that cannot be differentiated: no leaf and no view, on the same memory."""
    return _without_way_back()(tensor.requires_grad_())


def hook_backward(result: Any, alias: Any, hooks: dict[int, Any]) -> None:
    """Let every backward that goes through what computed `result` call what is in `hooks` by then.

    `Node.register_prehook` costs 12 us. A dict it takes from a tensor only: from `alias`, which has it no longer then.
    """
    alias._backward_hooks = hooks
    result.grad_fn._register_hook_dict(alias)
    alias._backward_hooks = None

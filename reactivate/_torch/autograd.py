"""Autograd: saved-tensor hooks, the backward that runs, nodes, custom functions, saved tensors, versions and views."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from types import CodeType, FrameType
from typing import Any, TypeVar

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from reactivate._torch.modes import run_unseen
from reactivate._torch.private_api import resolve_private

_ones = functools.partial(torch.ones, 1, device="cpu", requires_grad=True)

# -- saved-tensor hooks -----------------------------------------------------------------------------------------------


def same(tensor: Tensor) -> Tensor:
    """Hook: keep it as it is."""
    return tensor


def _are_hooks(push: Any, pop: Any) -> bool:
    seen: list[Any] = []
    push(seen.append, same)
    _ones().exp()
    pop()
    _ones().exp()
    return len(seen) == 1


# `torch.autograd.graph.saved_tensors_hooks` builds an object a region and costs 1 us more.
push_saved_tensor_hooks, pop_saved_tensor_hooks = resolve_private(
    "installing saved-tensor hooks without a context object",
    "torch._C._autograd._push_saved_tensors_default_hooks",
    "torch._C._autograd._pop_saved_tensors_default_hooks",
    probe=_are_hooks,
    public=(
        lambda pack, unpack: saved_tensors_hooks(pack, unpack).__enter__(),
        saved_tensors_hooks(same, same).__exit__,  # of whichever are innermost
    ),
)


_top_saved_tensor_hooks = resolve_private(
    "detecting saved-tensor hooks around a call",
    "torch._C._autograd._top_saved_tensors_default_hooks",
    lost="every region",
)


def innermost_pack_hook() -> Any:
    """The pack hook that autograd would call now, or None."""
    hooks = _top_saved_tensor_hooks(True)
    return None if hooks is None else hooks[0]


def pop_hooks_of(owner: Any) -> None:
    """Pop the innermost saved-tensor hooks if they are of `owner`: an interrupt may have come before they were pushed."""
    pack = innermost_pack_hook()
    if getattr(getattr(pack, "func", pack), "__self__", None) is owner:
        forget_users_hooks()
        pop_saved_tensor_hooks()


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
        return getattr(getattr(getattr(pack, "func", pack), "__self__", None), "users_hooks", None)
    return None if is_of_checkpointing(pack) else (pack, hooks[1])


def is_of_checkpointing(pack: Any) -> bool:
    """Return whether a pack hook is a region's, or that of torch's checkpoint: what it is given is not kept."""
    return getattr(pack, "_checkpoint_internal", False) or getattr(pack, "__module__", None) == "torch.utils.checkpoint"


def is_of_a_region(pack: Any) -> bool:
    """Return whether a pack hook is a region's, which hands a tensor out as often as it is read."""
    return str(getattr(getattr(pack, "func", pack), "__module__", "")).startswith("reactivate.")


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


# -- grad mode and profilers ------------------------------------------------------------------------------------------


# `torch.enable_grad()` and back: without an object in between. (A probe runs with gradients on.)
set_grad_enabled: Callable[[bool], Any] = resolve_private(
    "setting grad mode directly",
    "torch._C._set_grad_enabled",
    probe=lambda put: [(put(is_on), torch.is_grad_enabled())[1] for is_on in (False, True)] == [False, True],
    public=torch.set_grad_enabled,
)
# Whether a profiler is on: `record_function` costs 5 us even without one.
is_profiling: Callable[[], bool] = resolve_private(
    "detecting a profiler",
    "torch.autograd._profiler_enabled",
    probe=lambda ask: ask() in (True, False),
    public=lambda: True,
)


def is_forward_mode_active() -> bool:
    """Return whether a context of `forward_ad.dual_level` is open."""
    return torch.autograd.forward_ad._current_level >= 0


# -- the backward that runs -------------------------------------------------------------------------------------------


def _is_for_backwards(ask: Any) -> bool:
    try:
        ask(_ones().exp().grad_fn)
    except RuntimeError:  # there is no backward now, and to run one would start threads
        return True
    return False


# The number of the backward running on this thread, -1 for none: whether a recomputation has a backward to live as long as.
current_backward: Callable[[], int] = resolve_private(
    "detecting a running backward",
    "torch._C._current_graph_task_id",
    lost="every backward through a region",
)
# Calls a function when the backward that runs on this thread has finished without an error.
on_backward_end: Callable[[Callable[[], None]], None] = resolve_private(
    "a callback at the end of a backward",
    "torch.autograd.Variable._execution_engine.queue_callback",
    lost="every backward through a region that saves more than one tensor",
)
# The node whose backward runs on this thread, None if no backward does.
current_node: Callable[[], Any] = resolve_private(
    "the autograd node that is running",
    "torch._C._current_autograd_node",
    lost="backwards through custom functions inside of regions, and plans",
)
# Autograd numbers its nodes in the order in which they are made: that tells where in the forward pass a node belongs.
next_node_number: Callable[[], int] = resolve_private(
    "the sequence number of the next autograd node",
    "torch.autograd._get_sequence_nr",
    probe=lambda ask: ask() < (_ones().exp(), ask())[1],
    lost="regions that save tensors without a gradient, policies that save functions, and plans",
)
# Whether the backward that is running will run a node. It raises for a leaf whose gradient is asked for.
_will_run: Callable[[Any], bool] = resolve_private(
    "detecting what a running backward will compute",
    "torch._C._will_engine_execute_node",
    probe=_is_for_backwards,
    without=lambda node: False,
    lost="under `shared_recompute` recomputed tensors stay until autograd frees the graph",
)


def is_function_running() -> bool:
    """Return whether the backward of a custom `torch.autograd.Function` runs on this thread."""
    return isinstance(current_node(), torch.autograd.function.BackwardCFunction)


def current_node_number() -> int | None:
    """The number of the node whose backward runs on this thread; -1 if it has none; None if no backward runs."""
    node = current_node()
    number = None if node is None else int(node._sequence_nr())
    return number if number is None or number < 2**63 else -1


def is_left_for_another_backward() -> bool:
    """Return whether the node that is running on this thread has an edge that its backward does not take.

    Only another backward can compute the gradient for such an edge, and it reads what the node saved, maybe for a second
    time. Where torch does not say which edges are taken, each node with an edge counts.
    """
    node = current_node()
    return node is not None and not all(is_taken(following) for following, _ in node.next_functions)


def is_taken(node: Any) -> bool:
    """Return whether the backward that is running goes on at a node; where torch does not say so, it does not."""
    try:
        return node is None or _will_run(node)
    except RuntimeError:
        return True


def has_graph(tensor: Tensor) -> bool:
    """Return whether a tensor is the result of an op that can be differentiated, or was until something wrote past it."""
    try:
        return tensor.grad_fn is not None
    except RuntimeError:  # one of several views that an op made, and another was written to
        return True


# -- custom functions -------------------------------------------------------------------------------------------------

# Python frames of `torch.autograd.Function.apply`: what it saves may be read more than once in a backward. None where that
# is written in C (torch >= 2.14).
FUNCTION_APPLY_CODE: CodeType | None
FUNCTION_APPLY_CODE = getattr(getattr(torch.autograd.Function.apply, "__func__", None), "__code__", None)


def _is_off_in_functions(ask: Any) -> bool:
    seen: list[bool] = []

    class Look(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            seen.append(ask())
            return x.clone()

    Look.apply(_ones())
    return ask() and seen == [False]


# Whether forward-mode AD may take part. Autograd turns it off for the `forward` of a custom function, and on again before
# it saves what that function asked for; `torch.enable_grad` does not turn it on. So it says whether such a `forward` runs,
# also where `Function.apply` is written in C and leaves no frame.
is_outside_of_functions: Callable[[], bool] = resolve_private(
    "detecting a running forward of a custom function",
    "torch._C._is_fwd_grad_enabled",
    probe=_is_off_in_functions,
    lost="every backward through a region",
)


def has_setup_context(kind: type[torch.autograd.Function]) -> bool:
    """Return whether the context is filled in a function of its own, and `forward` does not get it."""
    return kind.setup_context is not torch.autograd.function._SingleLevelFunction.setup_context


@functools.cache
def _without_way_back() -> Any:
    text = "A backward inside of a checkpointed region went through a call that its recomputation skips."
    return torch._C._functions.DelayedError(text, 1)


def as_a_result(tensor: Tensor) -> Tensor:
    """`tensor` as the result of an op that cannot be differentiated: no leaf and no view, on the same memory."""
    return _without_way_back()(tensor.requires_grad_())


def hook_backward(result: Any, alias: Any, hooks: dict[int, Any]) -> None:
    """Let every backward that goes through what computed `result` call what is in `hooks` by then.

    `Node.register_prehook` costs 12 us. A dict it takes from a tensor only: from `alias`, which has it no longer then.
    """
    alias._backward_hooks = hooks
    result.grad_fn._register_hook_dict(alias)
    alias._backward_hooks = None


def give_hooks(tensor: Any, hooks: dict[int, Any]) -> None:
    """Give a tensor that has no hooks yet these ones, as `Tensor.register_hook` does one at a time."""
    tensor._backward_hooks = OrderedDict(hooks)
    if tensor.grad_fn is not None:
        tensor.grad_fn._register_hook_dict(tensor)


# -- saved tensors outside of any node: inputs of regions are kept in these, so that hooks around a region see them and
#    autograd checks their version ------------------------------------------------------------------------------------

with torch.inference_mode(False):
    _ANCHOR = torch.empty(0, device="cpu", requires_grad=True)  # so that there is a node


class _KeepInput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, tensor: Tensor) -> Tensor:
        ctx.save_for_backward(tensor)
        return run_unseen(functools.partial(torch.empty, 0, device="cpu"))


def _set_modes(grad: bool, forward_grad: bool) -> None:
    with torch._C.DisableTorchFunction():
        set_grad_enabled(grad)
        torch._C._set_fwd_grad_enabled(forward_grad)


class SavedOnNode:
    """A saved tensor on a node of its own: the public way."""

    __slots__ = ("_nested", "_output")

    def __init__(self, tensor: Tensor, is_output: bool) -> None:
        self._nested = (tensor, tensor._version) if tensor.is_nested else None  # which no custom function saves
        if self._nested is not None:
            return
        modes = torch.is_grad_enabled(), torch._C._is_fwd_grad_enabled()
        try:
            _set_modes(True, False)
            self._output = _KeepInput.apply(_ANCHOR, tensor)  # the node lives as long as this
        finally:
            try:
                _set_modes(*modes)
            except BaseException:  # an interrupt
                _set_modes(*modes)
                raise

    def unpack(self) -> Tensor:
        """The tensor, or autograd's own error if it was written to."""
        if self._nested is None:
            return self._output.grad_fn.saved_tensors[0]
        tensor, version = self._nested
        if tensor._version != version:
            raise RuntimeError("a nested tensor that a region reads has been modified by an inplace operation")
        return tensor


SavedTensor: Any
save_tensor: Callable[[Tensor, bool], Any]
# Since torch 2.12. `save_tensor(tensor, False)`: not an op's output.
SavedTensor, save_tensor = resolve_private(
    "saving a tensor without an autograd node",
    "torch._C._autograd.SavedTensor",
    "torch._C._autograd._make_saved_tensor",
    probe=lambda kind, save: isinstance(saved := save(_ones(), False), kind) and saved.unpack() is not None,
    public=(SavedOnNode, SavedOnNode),
)


def saver_of(frame: FrameType) -> FrameType:
    """Return the frame that saves a tensor, from that in which autograd does: it may be behind a node made for it."""
    maker = frame.f_back if frame.f_code is FUNCTION_APPLY_CODE else frame
    is_on_node = maker is not None and maker.f_code is SavedOnNode.__init__.__code__
    return (maker.f_back or frame) if maker is not None and is_on_node else frame


def data_of(saved: Any) -> Any:
    """Return what is kept for a saved tensor: the tensor, or what hooks made of it. (A node can only run them.)"""
    return saved.data if hasattr(saved, "data") else saved.unpack()


# -- saved tensors of the nodes of a graph, and something else in the place of one, after the op has saved it ----------

Rebuild = Callable[[], Tensor]


def nodes_since(tensor: Tensor, first: Any) -> Iterator[Any]:
    """Go through the nodes from the one that made `tensor` back to those that are no older than `first`, each once."""
    oldest = first._sequence_nr()
    seen: set[Any] = set()
    todo: list[Any] = [tensor.grad_fn]
    while todo:
        node = todo.pop()
        if node is not None and node not in seen and node._sequence_nr() >= oldest:
            seen.add(node)
            yield node
            todo += [following for following, _ in node.next_functions]


def saved_by(node: Any) -> list[Any]:
    """Return what a node has saved, as torch's `SavedTensor`s: attributes that torch has no other name for."""
    found: list[Any] = []
    for name in dir(node):
        if name.startswith("_raw_saved_"):
            saved = getattr(node, name)
            found += saved if isinstance(saved, (tuple, list)) else [saved]
    return [saved for saved in found if saved is not None]


def replace_saved(saved: Any, rebuild_of: Callable[[Tensor], Rebuild | None]) -> bool:
    """Let a saved tensor be rebuilt when it is read; return whether it is.

    Args:
        saved: a `SavedTensor`. What saved-tensor hooks have packed stays as it is.
        rebuild_of: tensor -> a function that makes it again, or None if it is to be kept.
    """
    if not hasattr(saved, "unpack_hook"):  # torch before 2.12 does not show what is saved, but to a hook
        return _replace_blindly(saved, rebuild_of)
    tensor = None if saved.unpack_hook is not None else saved.data
    rebuild = None if tensor is None else rebuild_of(tensor)
    if rebuild is not None:
        saved.register_hooks(lambda _: rebuild, _unpack)
    return rebuild is not None


def _replace_blindly(saved: Any, rebuild_of: Callable[[Tensor], Rebuild | None]) -> bool:
    asked: list[Any] = [rebuild_of]  # the node holds `pack` as long as it lives, which must not hold the tensors
    packed: list[bool] = []

    def pack(tensor: Tensor) -> Any:
        rebuild = asked.pop()(tensor)
        packed.append(rebuild is not None)
        return rebuild or (tensor, tensor._version)

    try:
        saved.register_hooks(pack, _unpack)
    except RuntimeError:  # there are hooks already, or nothing was saved
        return False
    return packed[0]


def _unpack(packed: Any) -> Tensor:
    if callable(packed):
        return packed()
    tensor, version = packed
    if tensor._version != version:  # a hook turns autograd's own check off
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"{torch.typename(tensor)} {list(tensor.shape)} is at version {tensor._version}; expected version {version}"
        )
    return tensor


# -- version counters: put back with the bytes of a tensor; and views, which share those of their base ----------------


_set_versions = resolve_private(
    "restoring a buffer without a new version",
    "torch._C._autograd._unsafe_set_version_counter",
    lost="regions that write to buffers",
)


def set_versions(tensors: Sequence[Tensor], versions: Sequence[int]) -> None:
    """Set version counters: memory whose bytes were put back is as if it had not been written to."""
    _set_versions(tuple(tensors), tuple(versions))


_exclude, _VIEWS = resolve_private(
    "version counters of aliases in a dispatch mode",
    "torch._C._SetExcludeDispatchKeyGuard",
    "torch._C.DispatchKey.ADInplaceOrView",
    lost="offloading by policies of torch's selective checkpointing",
)


def counting_versions() -> AbstractContextManager[Any]:
    """Return a context in which aliases have the version counter of what they are made from, in a dispatch mode too."""
    return _exclude(_VIEWS, False)


def _is_negated(view: Any) -> bool:
    x = torch.ones(1, device="cpu")
    negated = view(x)
    is_flipped = negated.is_neg() and negated.data_ptr() == x.data_ptr() and negated.item() == -1
    return is_flipped and not view(negated).is_neg()


negated_view: Callable[[Tensor], Tensor | None] = resolve_private(
    "a view with the other negation bit",
    "torch._neg_view",
    probe=_is_negated,
    without=lambda tensor: None,
    lost="a view of a buffer whose negation bit is flipped before the backward does not see what `.data` writes to it then",
)


def view_again(view: Tensor, base: Tensor) -> Tensor:
    """Return the view of another base, of the same shape, that `view` is of its own."""
    return view._view_func(base)


def base_of(tensor: Tensor) -> Tensor:
    """Return the base of a view, or the tensor itself."""
    return tensor if tensor._base is None else tensor._base

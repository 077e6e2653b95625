"""The only importer of private torch names.

Every name below says why no public name serves. `tests/test_compat.py` lists them with what each is relied on for, and
runs against every supported torch (2.9 to 2.14). What is looked up here when the package is imported is looked up in
`_torch`: what a torch does not have raises where it is used, if there is no other way.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import operator
import struct
import sys
import warnings
from collections.abc import Callable, Sequence
from types import CodeType
from typing import Any, NamedTuple, TypeVar

import torch
import torch.utils.checkpoint
from torch.nn import Module
from torch.nn.modules import module as _module
from torch.utils import _pytree
from torch.utils._python_dispatch import _disable_current_modes

from reactivate._names import Missing, first_of, is_missing, names_of

_torch = names_of("torch")
_WRAP = "torch._higher_order_ops.wrap"
_wrap = names_of(_WRAP)

# Saved-tensor hooks: `torch.autograd.graph.saved_tensors_hooks` builds an object a region and costs 1 us more.
push_saved_tensor_hooks = _torch._C._autograd._push_saved_tensors_default_hooks
pop_saved_tensor_hooks = _torch._C._autograd._pop_saved_tensors_default_hooks

# The innermost saved-tensor hooks, (pack, unpack), or None: whether somebody else's are around a call.
_top_saved_tensor_hooks = _torch._C._autograd._top_saved_tensors_default_hooks


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
    pack._checkpoint_internal, pack._user_hooks = True, None
    return pack


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


# `torch.enable_grad()` and back: without an object in between.
set_grad_enabled: Callable[[bool], None] = first_of(_torch._C._set_grad_enabled, torch.set_grad_enabled)

# The number of the backward running on this thread, -1 for none: whether a replay has a backward to live as long as.
current_backward: Callable[[], int] = _torch._C._current_graph_task_id

# Python frames of `torch.autograd.Function.apply`: what it saves may be read more than once in a backward. None where that
# is written in C (torch >= 2.14).
FUNCTION_APPLY_CODE: CodeType | None
FUNCTION_APPLY_CODE = getattr(getattr(torch.autograd.Function.apply, "__func__", None), "__code__", None)

# The node whose backward runs on this thread, None if no backward does.
current_node: Callable[[], Any] = _torch._C._current_autograd_node


def is_function_running() -> bool:
    """Return whether the backward of a custom `torch.autograd.Function` runs on this thread."""
    return isinstance(current_node(), torch.autograd.function.BackwardCFunction)


# Whether forward-mode AD may take part. Autograd turns it off for the `forward` of a custom function, and on again before
# it saves what that function asked for; `torch.enable_grad` does not turn it on. So it says whether such a `forward` runs,
# also where `Function.apply` is written in C and leaves no frame.
is_outside_of_functions: Callable[[], bool] = _torch._C._is_fwd_grad_enabled


def has_setup_context(kind: type[torch.autograd.Function]) -> bool:
    """Whether the context is filled in a function of its own, and `forward` does not get it."""
    return kind.setup_context is not torch.autograd.function._SingleLevelFunction.setup_context


# Container types that a library registered with torch: {type: (flatten_fn, unflatten_fn, ...)}.
registered_containers: dict[type, Any] = _pytree.SUPPORTED_NODES


def leaves_with_paths(value: Any) -> list[tuple[str, Any]]:
    """What is in nested containers, with the way to it: "[0]['hidden']"."""
    return [(_pytree.keystr(path), leaf) for path, leaf in _pytree.tree_leaves_with_path(value)]


def flatten(value: Any) -> tuple[list[Any], Any]:
    """What is in nested containers, and what `unflatten` needs to put it back."""
    if isinstance(value, torch.Tensor):  # as mostly
        return [value], None
    return _pytree.tree_flatten(value)


def unflatten(leaves: list[Any], structure: Any) -> Any:
    """The opposite of `flatten`."""
    return leaves[0] if structure is None else _pytree.tree_unflatten(leaves, structure)


_NO_WAY_BACK = "A backward inside of a checkpointed region went through a call that its replay skips."


@functools.cache
def _without_way_back() -> Any:
    return torch._C._functions.DelayedError(_NO_WAY_BACK, 1)


def give_back(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` as the result of an op that cannot be differentiated: no leaf and no view, on the same memory."""
    return _without_way_back()(tensor.requires_grad_())  # type: ignore[no-any-return]


def hook_backward(result: Any, alias: Any, hooks: dict[int, Any]) -> None:
    """Let every backward that goes through what computed `result` call what is in `hooks` by then.

    `Node.register_prehook` costs 12 us. A dict it takes from a tensor only: from `alias`, which has it no longer then.
    """
    alias._backward_hooks = hooks
    result.grad_fn._register_hook_dict(alias)
    alias._backward_hooks = None


# Whether a profiler is on: `record_function` costs 5 us even when nobody listens.
is_profiling: Callable[[], bool] = first_of(_torch.autograd._profiler_enabled, lambda: True)

# Values that autograd carries over to the threads that a backward runs on; a context variable stays behind.
_thread_state_has = _torch._C._is_key_in_tls
_thread_state_get = _torch._C._get_obj_in_tls
_thread_state_put: Callable[[str, Any], None] = _torch._C._stash_obj_in_tls
_own = ctypes.PYFUNCTYPE(None, ctypes.py_object)(("Py_IncRef", ctypes.pythonapi))


def _put_and_own(key: str, value: Any) -> None:
    _own(value)
    _thread_state_put(key, value)


def _find_put() -> Callable[[str, Any], None]:
    """torch gives a reference back when the next value comes, and before 2.12 takes none: Python would crash."""
    if is_missing(_thread_state_put):
        return _thread_state_put
    key, probe = "reactivate.probe", object()
    count = sys.getrefcount(probe)
    _thread_state_put(key, probe)
    if sys.getrefcount(probe) > count:
        _thread_state_put(key, None)
        return _thread_state_put
    _own(probe)
    _put_and_own(key, None)
    return _put_and_own


write_thread_state: Callable[[str, Any], None] = _find_put()


def read_thread_state(key: str) -> Any:
    """What `write_thread_state` put under `key`, or None."""
    return _thread_state_get(key) if _thread_state_has(key) else None


# Calls a function when the backward that runs on this thread has finished without an error.
_engine: Any = getattr(
    torch.autograd.Variable, "_execution_engine", Missing("torch.autograd.Variable._execution_engine")
)
on_backward_end: Callable[[Callable[[], None]], None] = _engine.queue_callback


# -- modes ------------------------------------------------------------------------------------------------------------

_count_function_modes = _torch._C._len_torch_function_stack
_count_dispatch_modes = _torch._C._len_torch_dispatch_stack
is_dispatch_mode_active: Callable[[], int] = _count_dispatch_modes
is_function_mode_active: Callable[[], bool] = _torch._C._is_torch_function_mode_enabled
# The engine's own looks at tensors are not the user's ops.
without_function_modes = _torch._C.DisableTorchFunction


push_function_mode: Callable[[Any], None] = _torch._C._push_on_torch_function_stack
pop_function_mode: Callable[[], Any] = _torch._C._pop_torch_function_stack
# Functions that `torch.nn.functional` re-exports, and the ops of `torch.ops`.
builtin_functions: Any = getattr(torch._C, "_nn", None)
OpOverload, OpOverloadPacket = _torch._ops.OpOverload, _torch._ops.OpOverloadPacket
HigherOrderOperator = _torch._ops.HigherOrderOperator


# How many `forward_ad.dual_level` contexts there are, less one.
def is_forward_mode_active() -> bool:
    """Whether forward-mode AD is at work."""
    return torch.autograd.forward_ad._current_level >= 0


def view_again(view: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    """What `view` is of its base, of another base of the same shape."""
    return view._view_func(base)  # type: ignore[attr-defined, no-any-return]


def qualified_name(packet: Any) -> str:
    """`library::op`."""
    return packet._qualified_op_name  # type: ignore[no-any-return]


@functools.cache
def written_arguments(op: Any) -> tuple[tuple[int, str, bool], ...]:
    """What `op`'s schema says that it writes to: (position, name, whether it can only be named, as `out=`) of each."""
    arguments = op._schema.arguments if isinstance(op, OpOverload) else ()
    return tuple(
        (position, item.name, item.kwarg_only)
        for position, item in enumerate(arguments)
        if item.alias_info is not None and item.alias_info.is_write
    )


def function_modes() -> tuple[Any, ...]:
    """The active `TorchFunctionMode`s, outermost first."""
    return tuple(map(torch._C._get_function_stack_at, range(_count_function_modes())))


def replace_function_modes(modes: tuple[Any, ...]) -> None:
    """Make `modes` the active ones. Their `__enter__` is not called: they were entered before."""
    for _ in range(_count_function_modes()):
        torch._C._pop_torch_function_stack()
    for mode in modes:
        torch._C._push_on_torch_function_stack(mode)


def dispatch_modes() -> tuple[Any, ...]:
    """The active `TorchDispatchMode`s but torch's machinery (fake tensors, tracing), outermost first."""
    modes = map(torch._C._get_dispatch_stack_at, range(_count_dispatch_modes()))
    return tuple(mode for mode in modes if getattr(mode, "_mode_key", None) is None)


def replace_dispatch_modes(modes: tuple[Any, ...]) -> None:
    """Make `modes` the active ones beside torch's machinery. Their `__enter__` is not called."""
    for _ in dispatch_modes():
        torch._C._pop_torch_dispatch_stack(None)
    for mode in modes:
        torch._C._push_on_torch_dispatch_stack(mode)


# -- modules ----------------------------------------------------------------------------------------------------------

# `module.__call__` runs the hooks around `forward`; a region that is a module goes inside of them.
module_call = Module.__call__
# Python frames that stand between a module's caller and its `forward`.
MODULE_CALL_CODE: CodeType | None = getattr(getattr(Module, "_call_impl", None), "__code__", None)


def has_hooks(module: Module) -> bool:
    """Whether calling `module` runs more than its `forward`."""
    return bool(
        module._forward_pre_hooks
        or module._forward_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or _module._global_forward_pre_hooks
        or _module._global_forward_hooks
        or _module._global_backward_hooks
        or _module._global_backward_pre_hooks
    )


def is_distributed(value: Any) -> bool:
    """Whether `value` is a DTensor. Importing that takes a second, so it is not imported for asking."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def is_distributed_run() -> bool:
    """Return whether this process is one of a group."""
    module = sys.modules.get("torch.distributed")
    return module is not None and module.is_available() and module.is_initialized()


def copy_unseen(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that neither autograd nor modes of the user's notice."""
    if not _count_dispatch_modes() and not _count_function_modes():
        return (tensor.detach() if tensor.requires_grad else tensor).clone()
    with torch._C.DisableTorchFunction():
        if type(tensor) is not torch.Tensor or torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY):
            return tensor.detach().clone()
        with _disable_current_modes():
            return tensor.detach().clone()


def run_unseen(function: Callable[..., Any], *args: Any) -> Any:
    """`function(*args)`, which neither modes of the user's nor torch's selective checkpointing notice."""
    if not _count_dispatch_modes() and not _count_function_modes():
        return function(*args)
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        return function(*args)


def equal_unseen(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether they are equal, asked of neither modes of the user's nor a fake-tensor mode, which could not say."""
    if not _count_dispatch_modes() and not _count_function_modes():
        return torch.equal(one, other)
    return run_unseen(torch.equal, one, other)


preserve_versions: Callable[[tuple[torch.Tensor, ...]], contextlib.AbstractContextManager[Any]]
preserve_versions = _torch.autograd._unsafe_preserve_version_counter


def set_versions(tensors: Sequence[torch.Tensor], versions: Sequence[int]) -> None:
    """Set version counters: memory whose bytes were put back is as if nobody had written to it."""
    torch._C._autograd._unsafe_set_version_counter(tuple(tensors), tuple(versions))


# Many tensors copied into others with one call; `torch.Tensor.copy_` costs a call of Python's for each.
copy_all: Callable[..., None] = first_of(
    _torch._foreach_copy_, lambda targets, sources: [target.copy_(source) for target, source in zip(targets, sources)]
)

# -- TorchScript ------------------------------------------------------------------------------------------------------

# The graph that TorchScript's interpreter ran last on this thread, None if it never did: 0.05 us.
last_script_graph: Callable[[], Any] = first_of(_torch._C._last_executed_optimized_graph, lambda: None)
# How many calls TorchScript watches before it compiles.
count_of_profiled_runs: Callable[[], int] = _torch._C._jit_get_num_profiled_runs


def is_profiling_graph(graph: Any) -> bool:
    """Whether TorchScript ran `graph` to see what to compile, and will run another one next time."""
    return any(node.kind() == "prim::profile" for node in graph.nodes())


def is_compiled_script(script: Any) -> bool:
    """Whether a scripted function or module has been called often enough to be compiled."""
    try:
        script.get_debug_state()
    except RuntimeError:
        return False
    return True


# -- transforms and compilers -----------------------------------------------------------------------------------------

# The innermost torch.func transform around the call, or None.
current_transform: Callable[[], Any] = _torch._C._functorch.peek_interpreter_stack
_TRANSFORMS = {
    "Grad": "torch.func.grad or vjp",
    "Jvp": "torch.func.jvp",
    "Vmap": "torch.func.vmap",
}


def name_of_transform() -> str | None:
    """What the innermost transform is called; None for functionalization, which is not the user's."""
    return _TRANSFORMS.get(current_transform().key().name)


_eval_frame = _torch._C._dynamo.eval_frame


def leave_to_eager(code: CodeType) -> None:
    """Let torch.compile compile neither frames with this code nor what they call.

    A region that a graph break left to eager would otherwise have a forward pass made of compiled pieces and a replay
    that is not. (`torch._dynamo.disable` wraps, and costs 10 us a call.)
    """
    if is_missing(_eval_frame.set_code_exec_strategy):
        _warn_of_compiled_regions()
        return
    action = _eval_frame._FrameAction.SKIP
    _eval_frame.set_code_exec_strategy(code, _eval_frame._FrameExecStrategy(action, action))


@functools.cache
def _warn_of_compiled_regions() -> None:
    warnings.warn(
        "With this torch, reactivate cannot keep torch.compile from compiling parts of a region that it left to eager. "
        "Compile nothing that has checkpointed regions in it, or install a newer reactivate.",
        stacklevel=2,
    )


def leave_out_of_graphs(function: Any) -> None:
    """`leave_to_eager`, also where a traced function calls this one: the graph ends before the call.

    Compiled autograd traces saved-tensor hooks, and a replay that is compiled saves other tensors than its forward pass.
    """
    leave_to_eager(function.__code__)
    function._torchdynamo_disable = True
    function._torchdynamo_disable_msg = "a replay runs as its forward pass did"


def _nothing(is_on: bool) -> None:
    """torch 2.9 has no such switch."""


# With `False`: of the compiled versions of a function that fit a call, take the oldest, not the one used last. So a replay
# takes the version that its forward pass took, also if others were compiled or used in between.
prefer_version_used_last: Callable[[bool], None] = first_of(_eval_frame._set_lru_cache, _nothing)


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
    """What dynamo knows of the call that the op being traced comes from."""
    return torch.fx.traceback.get_current_meta()


# Where the traced graph is not compiled further but run as it is (`backend="eager"`), torch checkpoints it with its own
# engine and without random states: gradients would be wrong. There the region keeps its activations. (torch < 2.12 does
# that by itself.)
_recompute_everything: Any = first_of(_wrap._always_prefer_recompute, None)


def _is_tracing() -> bool:
    keys = torch._C._TorchDispatchModeKey
    return any(map(torch._C._get_dispatch_mode, (keys.FAKE, keys.PROXY, keys.FUNCTIONAL)))


def runs_as_traced(function: Callable[..., Any]) -> bool:
    """Whether `function` is the inside of a traced region, which torch is running as it was traced."""
    return function.__module__ == _WRAP and not _is_tracing()


def warn_of_running_as_traced() -> None:
    """Say that a region is not recomputed, and why."""
    warnings.warn(
        'A checkpointed region is in a graph that torch.compile runs as it was traced (backend="eager"). It keeps its '
        'activations: only a backend that compiles the backward ("aot_eager", "inductor") recomputes.',
        stacklevel=2,
    )


def _contexts_in_graph(context_fn: Callable[[], Any]) -> Any:
    """What to enter for the forward pass and for the recomputation of a traced region."""
    if _is_tracing():
        return context_fn()
    warn_of_running_as_traced()
    return _KeepEverything(), contextlib.nullcontext()


def _contexts_by_default() -> Any:
    return _contexts_in_graph(_recompute_everything_contexts)


def _recompute_everything_contexts() -> Any:
    return torch.utils.checkpoint.create_selective_checkpoint_contexts(_recompute_everything)


_contexts_by_default.cache_hash = "reactivate: recompute everything"  # type: ignore[attr-defined]

if _recompute_everything is not None:
    # torch warns of contexts that the user passed. Here it is this package that did.
    logging.getLogger(_WRAP).addFilter(lambda entry: "context_fn is passed" not in str(entry.msg))


class _KeepEverything(contextlib.AbstractContextManager[None]):
    """Autograd keeps what it saves, also inside of saved-tensor hooks that would not."""

    ac_graph_id: int | None = None

    def __enter__(self) -> None:
        push_saved_tensor_hooks(_same, _same)

    def __exit__(self, *error: object) -> None:
        pop_saved_tensor_hooks()


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


# -- saved tensors ----------------------------------------------------------------------------------------------------

# A saved tensor of autograd's own outside of any node (torch >= 2.12): region inputs are kept in these, so that outer
# hooks (an offloader) see them and autograd checks their version. `save_tensor(tensor, False)`: not an op's output.
if not is_missing(_torch._C._autograd._make_saved_tensor):
    SavedTensor: Any = _torch._C._autograd.SavedTensor
    save_tensor: Callable[[torch.Tensor, bool], Any] = _torch._C._autograd._make_saved_tensor

else:

    def _empty(requires_grad: bool = False) -> torch.Tensor:
        """A tensor that no mode sees being made: torch >= 2.12 makes none."""
        modes = dispatch_modes()
        replace_dispatch_modes(())
        try:
            with torch._C.DisableTorchFunction():
                return torch.empty(0, device="cpu", requires_grad=requires_grad)
        finally:
            replace_dispatch_modes(modes)

    def _set_modes(grad: bool, forward_grad: bool) -> None:
        with torch._C.DisableTorchFunction():
            set_grad_enabled(grad)
            torch._C._set_fwd_grad_enabled(forward_grad)

    class _KeepInput(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, anchor: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(tensor)
            return _empty()

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            raise AssertionError("nothing differentiates through a kept input")

    class SavedTensor:  # type: ignore[no-redef]
        """A saved tensor on a node of its own: what torch < 2.12 has instead."""

        __slots__ = ("_output",)

        def __init__(self, tensor: torch.Tensor, is_output: bool) -> None:
            modes = torch.is_grad_enabled(), torch._C._is_fwd_grad_enabled()
            _set_modes(True, False)
            try:
                self._output = _KeepInput.apply(_empty(requires_grad=True), tensor)  # the node lives as long as this
            finally:
                _set_modes(*modes)

        def unpack(self) -> torch.Tensor:
            """The tensor, or autograd's own error if it was written to."""
            return self._output.grad_fn.saved_tensors[0]

    save_tensor = SavedTensor


# -- the CPU's generator ----------------------------------------------------------------------------------------------


def cpu_generator_memory() -> tuple[tuple[int, int], tuple[int, int], tuple[int, int]] | None:
    """Return where torch's CPU generator keeps its state: ((address, bytes), (address, bytes), (address, bytes)).

    First its seed, index and first words; then the spare normal numbers; then all of it. Torch has no cheaper question
    than a tensor with the whole state of 5 KB. The layout is found in a generator of known content, and tried out by
    drawing from it and from a copy: None if anything is not as expected.
    """
    seed, size = 0x5EED5EED, 24 + 16 * 4
    generator = torch.Generator()
    generator.manual_seed(seed)
    # seed: 8 bytes; left: 4; seeded: 1 and 3 of padding; next: 4; then 624 words, the first of which is the seed.
    # (`next` is not aligned to 8, so the words follow it at once.)
    expected = struct.pack("<Qi", seed, 1)
    offset = ctypes.string_at(generator._cdata, 192).find(expected)
    words = offset + struct.calcsize("<QiB3xI")
    second = (1812433253 * (seed ^ (seed >> 30)) + 1) & 0xFFFFFFFF
    if offset < 0 or ctypes.string_at(generator._cdata + words, 8) != struct.pack("<II", seed, second):
        return None
    spare = words + 624 * 4

    def look() -> tuple[bytes, bytes]:
        return ctypes.string_at(generator._cdata + offset, size), ctypes.string_at(generator._cdata + spare, 24)

    looks = [look()]
    for draw in (torch.rand, torch.randn, torch.randn):  # the second normal number is the spare of the first
        draw(1, generator=generator)
        looks.append(look())
    is_seen = looks[0][0] != looks[1][0] and looks[1] != looks[2] and looks[2][1] != looks[3][1]
    whole = spare + 24 - offset
    other = torch.Generator()
    ctypes.memmove(other._cdata + offset, generator._cdata + offset, whole)
    is_copied = torch.equal(other.get_state(), generator.get_state()) and all(
        torch.equal(torch.randn(number, generator=generator), torch.randn(number, generator=other))
        for number in (1, 3, 700, 1)
    )
    cdata = torch.default_generator._cdata
    if not (is_seen and is_copied):
        return None
    return (cdata + offset, size), (cdata + spare, 24), (cdata + offset, whole)


# -- ambient state ----------------------------------------------------------------------------------------------------
# torch's public context managers for these (`sdpa_kernel`, `autocast`, ...) cannot be asked for what is set, or cost
# microseconds each; the getters and setters below are what they call.


# `torch.accelerator.current_accelerator()` without a microsecond of Python.
accelerator_device: Callable[[], torch.device | None] = first_of(
    _torch._C._accelerator_getAccelerator, torch.accelerator.current_accelerator
)


class Flag(NamedTuple):
    """A setting that decides what ops compute."""

    name: str
    read: Callable[[], Any]
    write: Callable[[Any], None]


ask: Callable[[Callable[[], Any]], Any]
ask = getattr(operator, "call", None) or (lambda function: function())  # Python 3.11 has it in C


def _fp32_precision(backend: str, op: str) -> Flag:
    get, put = _torch._C._get_fp32_precision_getter, _torch._C._set_fp32_precision_setter
    read = get if is_missing(get) else functools.partial(get, backend, op)
    return Flag(f"{backend} {op} fp32_precision", read, functools.partial(put, backend, op))


def _reduced_precision(dtype: str) -> Flag:
    read = getattr(_torch._C, f"_get_cublas_allow_{dtype}_reduced_precision_reduction")
    write = getattr(_torch._C, f"_set_cublas_allow_{dtype}_reduced_precision_reduction")
    # A pair (allowed, with split-K) in newer torch, one bool in older.
    return Flag(f"{dtype} reduction", read, lambda value: write(*value) if isinstance(value, tuple) else write(value))


_CPU_FLAGS = (
    Flag("default dtype", torch.get_default_dtype, torch.set_default_dtype),
    Flag("deterministic", _torch._C._get_deterministic_algorithms, torch.use_deterministic_algorithms),
    Flag(
        "deterministic, warn only",
        _torch._C._get_deterministic_algorithms_warn_only,
        lambda value: torch.use_deterministic_algorithms(torch.are_deterministic_algorithms_enabled(), warn_only=value),
    ),
    _fp32_precision("mkldnn", "matmul"),
    Flag("mkldnn", _torch._C._get_mkldnn_enabled, _torch._C._set_mkldnn_enabled),
    Flag("flash sdp", _torch._C._get_flash_sdp_enabled, _torch._C._set_sdp_use_flash),
    Flag("math sdp", _torch._C._get_math_sdp_enabled, _torch._C._set_sdp_use_math),
    Flag("threads", torch.get_num_threads, torch.set_num_threads),
)


def _read_float32_matmul() -> str | None:
    try:
        return torch._C._get_float32_matmul_precision()  # type: ignore[no-any-return]
    except RuntimeError:  # the newer flags, which are above, say something that this older one has no word for
        return None


def _write_float32_matmul(value: str | None) -> None:
    if value is not None:
        torch._C._set_float32_matmul_precision(value)


_CUDA_FLAGS = (
    _fp32_precision("generic", "all"),
    _fp32_precision("cuda", "matmul"),
    _fp32_precision("cuda", "conv"),
    _fp32_precision("cuda", "rnn"),
    Flag("float32 matmul", _read_float32_matmul, _write_float32_matmul),
    _reduced_precision("fp16"),
    _reduced_precision("bf16"),
    Flag("cudnn", _torch._C._get_cudnn_enabled, _torch._C._set_cudnn_enabled),
    Flag("cudnn benchmark", _torch._C._get_cudnn_benchmark, _torch._C._set_cudnn_benchmark),
    Flag("cudnn deterministic", _torch._C._get_cudnn_deterministic, _torch._C._set_cudnn_deterministic),
    Flag("efficient sdp", _torch._C._get_mem_efficient_sdp_enabled, _torch._C._set_sdp_use_mem_efficient),
    Flag("cudnn sdp", _torch._C._get_cudnn_sdp_enabled, _torch._C._set_sdp_use_cudnn),
    Flag("overrideable sdp", _torch._C._get_overrideable_sdp_enabled, _torch._C._set_sdp_use_overrideable),
    Flag("sdp priority", _torch._C._get_sdp_priority_order, _torch._C._set_sdp_priority_order),
)
# A build without an accelerator has no use for the second half.
FLAGS: tuple[Flag, ...] = tuple(
    flag
    for flag in (_CPU_FLAGS if accelerator_device() is None else _CPU_FLAGS + _CUDA_FLAGS)
    if not is_missing(flag.read) and not is_missing(flag.write)
)
if accelerator_device() is not None:
    with (
        warnings.catch_warnings()
    ):  # torch 2.9 warns of the older flag once, when it is first read: that was not the user
        warnings.simplefilter("ignore")
        _read_float32_matmul()

is_any_autocast_enabled: Callable[[], bool] = first_of(
    _torch._C._is_any_autocast_enabled,
    lambda: any(map(torch.is_autocast_enabled, {"cpu", getattr(accelerator_device(), "type", "cpu")})),
)

# What `torch.<device type>` is, for a device type that came without a module of its own.
register_device_module: Callable[[str, Any], None] = _torch._register_device_module


def xla_runtime() -> Any:
    """torch_xla's bindings, None as long as torch_xla is not imported: seeds, devices and barriers have public names only
    in part, and these initialise the runtime.
    """
    # The first half is all that most calls come to, and there are some for each region.
    return getattr(sys.modules["torch_xla"], "_XLAC", None) if "torch_xla" in sys.modules else None


# -- accounts of what is kept -----------------------------------------------------------------------------------------

# Tensors without memory (`explain(fake=True)`): torch has no public name for them.
FakeTensor, FakeTensorMode = _torch._subclasses.FakeTensor, _torch._subclasses.FakeTensorMode


def data_of(saved: Any) -> Any:
    """What is kept for a saved tensor: the tensor, or what hooks made of it. (torch < 2.12 can only run these hooks.)"""
    return saved.data if hasattr(saved, "data") else saved.unpack()


# What runs with no fake tensor among its arguments can run for real: the fake mode is put aside for the time.
unset_fake_temporarily = _torch._subclasses.fake_tensor.unset_fake_temporarily

# The op that asks a tensor for its device: fake tensors are asked it several times an op, through every dispatch mode.
DEVICE_QUERY: Any = torch.ops.prim.device.default

# Autograd numbers its nodes in the order in which they are made: that tells where in the forward pass a node belongs.
next_node_number: Callable[[], int] = _torch.autograd._get_sequence_nr


def current_node_number() -> int | None:
    """The number of the node whose backward runs on this thread; -1 if it has none; None if no backward runs."""
    node = current_node()
    if node is None:
        return None
    number = int(node._sequence_nr())
    return number if number < 2**63 else -1


# What a fake tensor raises that is asked for its value.
DataDependentError: type[Exception] = _torch._subclasses.fake_tensor.DataDependentOutputException

"""Modules: what calling one runs, their dicts, who shards them or reduces their gradients; and classes of tensors."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from gc import get_referents
from types import CodeType, MappingProxyType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.modules import module as _module
from torch.nn.parallel import DistributedDataParallel

from reactivate._torch.modes import run_unseen
from reactivate._torch.private_api import Replaced, find, resolve_private

_Kind = TypeVar("_Kind", bound=Tensor)

# `module.__call__` runs the hooks around `forward`; a region that is a module goes inside of them.
module_call = Module.__call__
# Python frames that stand between a module's caller and its `forward`.
MODULE_CALL_CODE: CodeType | None = getattr(getattr(Module, "_call_impl", None), "__code__", None)
# Dictionaries of the hooks that run around every module, and of how those are called.
GLOBAL_FORWARD_HOOKS = _module._global_forward_pre_hooks, _module._global_forward_hooks
GLOBAL_HOOKS = *GLOBAL_FORWARD_HOOKS, _module._global_backward_pre_hooks, _module._global_backward_hooks
GLOBAL_FLAGS = _module._global_forward_hooks_with_kwargs, _module._global_forward_hooks_always_called


def has_hooks(module: Module) -> bool:
    """Return whether calling `module` runs more than its `forward`."""
    return bool(
        module._forward_pre_hooks
        or module._forward_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or any(GLOBAL_HOOKS)
    )


# -- versions of dicts ------------------------------------------------------------------------------------------------


def dict_of_class(kind: type) -> Any:
    """Return the dict behind the read-only view of a class's attributes, None if a metaclass gives another view."""
    view = vars(kind)
    return get_referents(view)[0] if type(view) is MappingProxyType else None


class _Attributed:
    """An object with attributes, which Python may keep outside of its `__dict__`."""


def _changes_with_all(version_of: Callable[[dict[Any, Any]], int]) -> bool:
    """Return whether a dict has another version after every way to write to it: Python 3.13 has one past a `__dict__`."""
    thing: Any = _Attributed()
    thing.item = 0
    kind: Any = type("_Class", (), {"item": 0})
    items: dict[str, Any] = {"item": 0}
    dicts = [vars(thing), dict_of_class(kind), items]
    seen = list(map(version_of, dicts))
    for number in range(1, 100):  # often enough for the interpreter to choose a faster way
        thing.item = kind.item = items["item"] = [number]
        seen += map(version_of, dicts)
    object.__setattr__(thing, "item", None)
    type.__setattr__(kind, "item", None)
    items.update(item=None)
    seen += map(version_of, dicts)
    del thing.item, kind.item, items["item"]
    seen += map(version_of, dicts)
    return list(map(version_of, dicts)) == seen[-3:] and len(set(seen)) == len(seen)


_count = itertools.count()
# A number that a dict has as long as it is not written to, and that no other dict has ever had: 0.03 us. Where there is
# none each look gives another one, and the items are compared.
version_of_dict: Callable[[dict[Any, Any]], int] = resolve_private(
    "the version of a dict",
    "torch._C._dynamo.guards.dict_version",
    probe=_changes_with_all,
    public=lambda items: next(_count),
)

# -- classes of tensors -----------------------------------------------------------------------------------------------

_make: Any = find("torch.Tensor._make_wrapper_subclass")


def has_memory(kind: type[Tensor]) -> bool:
    """Return whether tensors of a class have memory of their own, as plain ones have.

    Those that are made of others do not, and neither do fake ones.
    """
    return kind.__torch_dispatch__ is Tensor.__torch_dispatch__


def without_memory(kind: type[_Kind], like: Tensor, dtype: torch.dtype) -> _Kind:
    """Return a tensor of class `kind` with the shape, strides and device of another, and no memory behind it."""
    return _make(
        kind, like.shape, strides=like.stride(), storage_offset=like.storage_offset(), dtype=dtype, device=like.device
    )


def are_distributed_alike(one: Any, other: Any) -> bool:
    """Return whether two tensors are DTensors of one mesh with the same placements, or no DTensors.

    Importing that class takes a second, so it is not imported for asking.
    """
    library = sys.modules.get("torch.distributed.tensor")
    if library is None:
        return True
    pair = [(item.device_mesh, item.placements) if isinstance(item, library.DTensor) else None for item in (one, other)]
    return pair[0] == pair[1]


def is_flat_wrapper(kind: type) -> bool:
    """Return whether modules of a class are units of `FullyShardedDataParallel`."""
    library = sys.modules.get("torch.distributed.fsdp")
    return library is not None and issubclass(kind, library.FullyShardedDataParallel)


def is_in_flat_parameter(item: Any) -> bool:
    """Return whether `item` is a flat parameter of `FullyShardedDataParallel`, or a part of one or a view of it.

    That takes parameters out of modules and puts views there, and back again, as the whole comes and goes.
    """
    if not isinstance(item, Tensor):
        return False
    return hasattr(item, "_fsdp_flattened") or (item._is_view() and hasattr(item._base, "_fsdp_flattened"))


class DistributedLayout(NamedTuple):
    """The place of a DTensor on the ranks.

    Attributes:
        mesh, placements: its own.
        shape, stride: of the part that this rank has.
    """

    mesh: Any
    placements: Any
    shape: torch.Size
    stride: tuple[int, ...]


def layout_of(tensor: Any) -> DistributedLayout | None:
    """Return how a tensor lies on the ranks; None for one that is no DTensor."""
    library = sys.modules.get("torch.distributed.tensor")
    if library is None or not isinstance(tensor, library.DTensor):
        return None
    local = tensor.to_local()
    return DistributedLayout(tensor.device_mesh, tensor.placements, local.shape, local.stride())


def laid_out(like: Any, layout: DistributedLayout, make: Callable[[Tensor], Tensor]) -> Tensor:
    """Return a DTensor as large as another one, that lies on the ranks in another way.

    Args:
        make: makes the part of this rank: `torch.empty_like`, say.
    """
    local = make(like.to_local().detach().new_empty_strided(layout.shape, layout.stride))
    whole = {"shape": like.shape, "stride": like.stride()}
    return type(like).from_local(local, layout.mesh, layout.placements, run_check=False, **whole)


def are_made_of_tensors(types: Iterable[type]) -> bool:
    """Return whether one of these classes is of tensors that are made of others, as DTensors are.

    What an op on such a tensor computes, and sends, are ops on its parts. A dispatch mode that is to see these returns
    NotImplemented.
    """
    return any(hasattr(kind, "__tensor_flatten__") for kind in types)


def layouts_unseen() -> AbstractContextManager[None]:
    """Inside, no mode sees how DTensors find out the size of a result: by the same op on tensors of all ranks' size."""
    library = sys.modules.get("torch.distributed.tensor._sharding_prop")
    if library is None:
        return nullcontext()
    kind, name = library.ShardingPropagator, "_propagate_tensor_meta_non_cached"
    before = getattr(kind, name)
    return Replaced(lambda: [(kind, name, lambda *given: run_unseen(before, *given))])


def is_distributed_run() -> bool:
    """Return whether this process is one of a group."""
    module = sys.modules.get("torch.distributed")
    return module is not None and module.is_available() and module.is_initialized()


# -- `fully_shard`: torch has no public name for the state that it keeps for a module ----------------------------------

_ADDED_UP = "unsharded_accumulated_grad"


def sharded_class() -> Any:
    """Return the class of modules that `fully_shard` has sharded; no class where the library is not imported."""
    library = sys.modules.get("torch.distributed.fsdp")
    return () if library is None else library.FSDPModule


def sharded_in(modules: Iterable[Module]) -> list[Module]:
    """Return those of some modules that `fully_shard` has sharded."""
    sharded = sharded_class()
    return [module for module in modules if isinstance(module, sharded)]


def is_sharded(model: Module) -> bool:
    """Return whether `fully_shard` has sharded parameters of a model."""
    return bool(sharded_in(model.modules()))


def sharding_state(module: Module) -> Any:
    """Return the object in which `fully_shard` keeps what it knows of a module; None where this torch does not show it."""
    return getattr(module, "_get_fsdp_state", lambda: None)()


def is_gathered(module: Module) -> bool:
    """Return whether a sharded module has its parameters as a whole now, as in its forward."""
    return any(getattr(group, "is_unsharded", False) for group in _groups_of(sharding_state(module)))


def rest(state: Any) -> None:
    """Let an object of those in which `fully_shard` keeps what it knows be as it is while no step runs."""
    if hasattr(state, "_training_state"):
        state._training_state = type(state._training_state).IDLE
    if hasattr(state, "iter_forward_root"):
        state.iter_forward_root = None


def is_root(module: Module) -> bool:
    """Return whether a sharded module has run its forward as the outermost one, so that it answers for those in it."""
    return bool(getattr(sharding_state(module), "_is_root", False))


def has_unreduced_gradients(modules: Iterable[Module]) -> bool:
    """Return whether sharded modules keep gradients of whole parameters, which a backward without a reduction has left."""
    return any(
        getattr(parameter, _ADDED_UP, None) is not None or (whole is not None and whole.grad is not None)
        for parameter, whole in _parameters_in(modules)
    )


def drop_unreduced_gradients(modules: Iterable[Module]) -> None:
    """Let go of these gradients: those of a backward that an error has ended."""
    for parameter, whole in _parameters_in(modules):
        if whole is not None:
            whole.grad = None
        if getattr(parameter, _ADDED_UP, None) is not None:
            setattr(parameter, _ADDED_UP, None)


def _parameters_in(modules: Iterable[Module]) -> Iterator[tuple[Any, Any]]:
    """Yield what is known of each sharded parameter, and the whole of it; None if it was never gathered."""
    for state in map(sharding_state, sharded_in(modules)):
        for group in _groups_of(state):
            for parameter in getattr(group, "fsdp_params", ()):
                yield parameter, getattr(parameter, "_unsharded_param", None)


def _groups_of(state: Any) -> list[Any]:
    """Return what is known of the parameters that are gathered together: one object for each group of them."""
    return getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]


def padded_sizes(modules: Iterable[Module]) -> dict[int, int]:
    """Return how many elements this rank has of each sharded parameter, by its id, those counted that fill it up.

    All ranks have as many, and so has each rank of the gradients.
    """
    return {id(item.sharded_param): item.padded_sharded_param_size.numel() for item, _ in _parameters_in(modules)}


def are_on_host(modules: Iterable[Module]) -> bool:
    """Return whether sharded modules keep parameters in the memory of the host, beside a device that computes."""
    return any(item.offload_to_cpu for item, _ in _parameters_in(modules))


def prepare_sharding(modules: Iterable[Module]) -> None:
    """Make ready what the first forward pass of sharded modules would make ready."""
    sharded = sharded_in(modules)
    inner = {id(part) for module in sharded for part in module.modules() if part is not module}
    for module in sharded:
        if id(module) not in inner:
            getattr(sharding_state(module), "_lazy_init", lambda: None)()


# -- reducers of `DistributedDataParallel`, after a step that an error has ended ---------------------------------------

_reset_state, _rebuild_buckets = resolve_private(
    "a reducer of gradients, ready for another step",
    "torch._C._distributed_c10d.Reducer._reset_state",
    "torch._C._distributed_c10d.Reducer._rebuild_buckets",
    lost="`retry_on_oom` for models in `DistributedDataParallel`",
)


def rebuild_buckets(model: DistributedDataParallel) -> None:
    """Let a reducer order its buckets by when gradients came, if it is about to: its next forward would, on all ranks."""
    if _rebuild_buckets(model.reducer):
        model._has_rebuilt_buckets = True


def has_rebuilt_buckets(model: DistributedDataParallel) -> bool:
    """Return whether it has."""
    return bool(model._has_rebuilt_buckets)


def reset_reducer(model: DistributedDataParallel) -> None:
    """Make a reducer ready for a step, whatever the last one came to. All ranks have to do it."""
    _reset_state(model.reducer)
    model._has_rebuilt_buckets = False


def without_rebuilding(model: DistributedDataParallel) -> AbstractContextManager[None]:
    """Leave the buckets as they are inside of the context."""
    return _replaced(model, _rebuild_buckets=lambda: False)


def without_reducing(model: DistributedDataParallel) -> AbstractContextManager[None]:
    """Keep the reducer from waiting for gradients, inside of the context: for a step whose gradients it will not see.

    It would wait for them in the next backward if none came in this one.
    """
    nothing = lambda *args: None  # noqa: E731
    return _replaced(model, _rebuild_buckets=lambda: False, prepare_for_forward=nothing, prepare_for_backward=nothing)


@contextmanager
def _replaced(model: DistributedDataParallel, **methods: Callable[..., Any]) -> Iterator[None]:
    reducer = model.reducer
    model.reducer = _Reducer(reducer, methods)  # type: ignore[assignment]
    try:
        yield
    finally:
        model.reducer = reducer


class _Reducer:
    """A reducer some of whose methods are others."""

    def __init__(self, reducer: Any, methods: dict[str, Callable[..., Any]]) -> None:
        self._reducer = reducer
        vars(self).update(methods)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reducer, name)

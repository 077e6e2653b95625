"""Regions on a device whose compiler would merge the replay with the forward pass (see `_backends/fence.py`).

Two things keep them apart. What goes out of a region goes through an *exit*: a node of autograd's graph that gets the
gradients of all outputs before anything in the region needs one. It puts these gradients and whatever the replay will
read behind one fence, and replays the region there: so no part of it can run before its backward begins. And the replay
reads *aliases*: of the arguments, which are rebuilt for it anyway, and of parameters, buffers and whatever else is
there before it, which a function mode puts in their place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from reactivate._backends import Fence, fences
from reactivate._compat import (
    flatten,
    function_modes,
    is_function_mode_active,
    pop_function_mode,
    push_function_mode,
    unflatten,
    view_again,
    without_function_modes,
)
from reactivate._engine.capture import Capture
from reactivate._engine.forms import Memo, rebuild
from reactivate._engine.site_log import tensors_in

Gradients = Sequence[Tensor | None]


def fence_of(tensors: Iterable[Tensor]) -> tuple[str, Fence] | None:
    """The device type of the first of `tensors` that needs a fence, and the fence."""
    known = fences()
    for tensor in tensors:
        kind = tensor.device.type
        if kind in known:
            return kind, known[kind]
    return None


# -- the exit ---------------------------------------------------------------------------------------------------------


class Exit(torch.autograd.Function):
    """Hands the outputs of a region out, and its gradients in."""

    @staticmethod
    def forward(ctx: Any, region: Any, *outputs: Tensor) -> tuple[Tensor, ...]:
        # Weakly: autograd lets go of what it saved when a backward is done, and of a node only with the loss.
        ctx.region = ref(region)
        ctx.set_materialize_grads(False)
        return tuple(output.clone() for output in outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        region = ctx.region()
        if region is None:  # nothing of it is needed
            return None, *gradients
        fenced = region.replay_behind(gradients)
        return None, *(Behind.apply(fenced, *gradients) if torch.is_grad_enabled() else fenced)


class Behind(torch.autograd.Function):
    """The gradients behind the fence as a function of those before it, for a backward that is differentiated."""

    @staticmethod
    def forward(ctx: Any, fenced: Gradients, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.set_materialize_grads(False)
        return tuple(fenced)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        return None, *gradients


def through_exit(region: Any, result: Any, capture: Capture) -> Any:
    """`result`, with every tensor that the region computed handed out by its exit.

    What it was given and hands back (an argument, a view of one) is the caller's own, and its gradient none of the
    region's. Two outputs that share memory share it afterwards, too.
    """
    if is_function_mode_active():
        modes = [mode for mode in function_modes() if isinstance(mode, _Aliases)]
        with without_function_modes():
            handed = _handed_out(region, result, capture)
        for mode in modes:  # the replay of a region around this one
            mode.own(tensors_in((handed,), {}))
        return handed
    return _handed_out(region, result, capture)


def _handed_out(region: Any, result: Any, capture: Capture) -> Any:
    leaves, structure = flatten(result)
    given = {id(_base_of(tensor)) for tensor, _ in capture.tensors}
    known = fences()
    ours = {
        id(leaf): leaf
        for leaf in leaves
        if isinstance(leaf, Tensor)
        and leaf.grad_fn is not None
        and leaf.device.type in known
        and id(_base_of(leaf)) not in given
        and not _base_of(leaf).is_leaf
    }
    if not ours:
        return result
    sources = _sources(ours.values())
    handed = dict(zip(sources, Exit.apply(region, *sources.values())))
    new = {
        key: handed[key] if key in handed else view_again(leaf, handed[id(leaf._base)]) for key, leaf in ours.items()
    }
    return unflatten([new.get(id(leaf), leaf) for leaf in leaves], structure)


def _sources(outputs: Iterable[Tensor]) -> dict[int, Tensor]:
    """What goes through the exit, by id: a tensor itself, or the one memory that several are views of."""
    groups: dict[int, list[Tensor]] = {}
    for tensor in outputs:
        groups.setdefault(id(_base_of(tensor)), []).append(tensor)
    alone = [group[0] if len(group) == 1 else _base_of(group[0]) for group in groups.values()]
    return {id(tensor): tensor for tensor in alone}


def _base_of(tensor: Tensor) -> Tensor:
    return tensor if tensor._base is None else tensor._base


# -- the replay -------------------------------------------------------------------------------------------------------


class FencedReplay:
    """What one replay reads, behind a fence.

    Args:
        device_type: of the tensors that need it.
        fence: the device's.
        gradients: of the outputs, where the backward comes through the exit.

    Attributes:
        gradients: once the replay has begun, these behind the fence.
    """

    def __init__(self, device_type: str, fence: Fence, gradients: Gradients = ()) -> None:
        self._device_type = device_type
        self._fence = fence
        self.gradients = gradients
        self._given: list[tuple[int, Tensor]] = []  # by form

    def read(self, record: Any) -> None:
        """Get the arguments: a region around this one may have to be replayed for them, as long as all is as it is.

        Raises:
            RuntimeError: autograd's own, where one of them was written to since.
        """
        self._given = [(id(form), rebuild(form, {})) for form in record.entries]

    @contextmanager
    def standing(self, record: Any) -> Iterator[Memo]:
        """Aliases of the arguments by their forms; inside, everything else that is there already is read by alias."""
        given = [(key, tensor) for key, tensor in self._given if self._is_concerned(tensor)]
        named = {id(tensor): tensor for tensor in _named(record) if self._is_concerned(tensor)}
        gradients = [tensor for tensor in self.gradients if tensor is not None and self._is_concerned(tensor)]
        fenced = iter(self._fence([*gradients, *(tensor for _, tensor in given), *named.values()]))
        behind = {id(tensor): next(fenced) for tensor in gradients}
        memo: Memo = dict(self._given)
        memo |= {key: alias_like(tensor, next(fenced)) for key, tensor in given}
        aliases = {key: (tensor, alias_like(tensor, next(fenced))) for key, tensor in named.items()}
        self.gradients = [tensor if tensor is None else behind.get(id(tensor), tensor) for tensor in self.gradients]
        token = next((tensor for tensor in self.gradients if tensor is not None), None)
        mode = _Aliases(self._device_type, self._fence, aliases, token)
        mode.own(memo.values())
        del given, named, gradients, fenced, behind, aliases, token
        self._given = []
        push_function_mode(mode)
        try:
            yield memo
        finally:
            pop_function_mode()
            mode.let_go()

    def _is_concerned(self, tensor: Tensor) -> bool:
        return tensor.device.type == self._device_type


def _named(record: Any) -> Iterator[Tensor]:
    """What the replay will find by name."""
    for module in record.modules:
        for registry in (module._parameters, module._buffers):
            yield from (tensor for tensor in registry.values() if tensor is not None)
    for watched in record.watched:
        value = watched.namespace.get(watched.name)
        if isinstance(value, Tensor):
            yield value


def alias_like(tensor: Tensor, alias: Tensor) -> Tensor:
    """`alias` with the place in a graph that `tensor` has: a leaf where it is one."""
    if not tensor.requires_grad:
        return alias
    with without_function_modes(), torch.enable_grad():
        alias.requires_grad_()
        return alias if tensor.is_leaf else alias.clone()


class _Aliases(TorchFunctionMode):
    """Gives every call of torch's functions aliases of what was there before the replay.

    What the replay has made itself bears a mark. Anything else is looked up, and put behind the fence when it comes as a
    surprise: a tensor in an attribute of some object, what a saved call kept.

    Args:
        device_type: of the tensors that need an alias.
        fence: makes one.
        aliases: {id: (tensor, its alias)}.
        token: a tensor that surprises have to stand behind, too.
    """

    def __init__(
        self, device_type: str, fence: Fence, aliases: dict[int, tuple[Tensor, Tensor]], token: Tensor | None
    ) -> None:
        self._device_type = device_type
        self._fence = fence
        self._aliases = aliases
        self._token = token
        self._mark = object()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _OF_THE_OBJECT or (getattr(func, "__name__", "") in _ACCESSORS and func not in _READS):
            return func(*args, **kwargs)
        with without_function_modes():  # these looks are not the user's
            args = self._aliased(args)
            kwargs = self._aliased(kwargs)
        result = func(*args, **kwargs)
        with without_function_modes():
            self.own(tensors_in((result,), {}))
        return result

    def own(self, tensors: Iterable[Any]) -> None:
        """The replay made these."""
        for tensor in tensors:
            if isinstance(tensor, Tensor):
                tensor._reactivate_replay = self._mark  # type: ignore[attr-defined]

    def let_go(self) -> None:
        """Hold nothing: what still lives when a graph is cut off becomes one of its outputs."""
        self._aliases = {}
        self._token = None

    def _aliased(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            is_own = value.device.type != self._device_type or _mark_of(value) is self._mark
            return value if is_own else self._alias_of(value)
        if isinstance(value, (list, tuple)) and tensors_in((value,), {}):
            items = [self._aliased(item) for item in value]
            return getattr(type(value), "_make", type(value))(items)
        if isinstance(value, dict) and tensors_in((value,), {}):
            return {name: self._aliased(item) for name, item in value.items()}
        return value

    def _alias_of(self, tensor: Tensor) -> Tensor:
        if id(tensor) not in self._aliases:
            behind = [tensor] if self._token is None else [tensor, self._token]
            alias = alias_like(tensor, self._fence(behind)[0])
            self._aliases[id(tensor)] = tensor, alias
            self._token = alias.detach() if self._token is None else self._token
        return self._aliases[id(tensor)][1]


def _mark_of(tensor: Tensor) -> Any:
    return getattr(tensor, "_reactivate_replay", None)


_ACCESSORS = frozenset({"__get__", "__set__", "__delete__"})
_ATTRIBUTES: Any = [getattr(Tensor, name) for name in ("T", "mT", "H", "mH", "real", "imag", "data")]
_READS: frozenset[Callable[..., Any]] = frozenset(attribute.__get__ for attribute in _ATTRIBUTES)
"""Accessors that give out what is in the tensor. Others are about the object: its shape, its gradient, its hooks."""
_OF_THE_OBJECT: frozenset[Callable[..., Any]] = frozenset(
    {Tensor.__hash__, Tensor.dim, Tensor.size, Tensor.stride, Tensor.is_floating_point, Tensor.is_complex, Tensor.numel}
)

"""Regions on a device whose compiler would merge the replay with the forward pass (see `_backends/fence.py`).

Two things keep them apart. What goes out of a region goes through an *exit*: a node of autograd's graph that gets the
gradient before anything in the region needs it. The first one that a backward comes to puts this gradient and whatever
the replay will read behind one fence, and replays the region there: no part of it can run before its backward begins.
And the replay reads *aliases*: of the arguments, which are rebuilt for it anyway, and of parameters, buffers and
whatever else is there before it, which a function mode puts in their place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.nn import Module
from torch.overrides import TorchFunctionMode

from reactivate._backends import Fence, fences
from reactivate._compat import (
    copy_unseen,
    flatten,
    function_modes,
    is_function_mode_active,
    pop_function_mode,
    preserve_versions,
    push_function_mode,
    replace_function_modes,
    run_unseen,
    unflatten,
    view_again,
    without_function_modes,
)
from reactivate._engine.capture import Capture
from reactivate._engine.forms import Memo, rebuild
from reactivate._engine.site_log import tensors_in


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
    """Hands an output of a region out, and its gradient in.

    Each output has one of its own: a node for all of them would make one graph of what are several, and a backward
    through one of them would free the others.
    """

    @staticmethod
    def forward(ctx: Any, region: Any, output: Tensor) -> Tensor:
        # Weakly: autograd lets go of what it saved when a backward is done, and of a node only with the loss.
        ctx.region = ref(region)
        ctx.set_materialize_grads(False)
        return copy_unseen(output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Any:
        region = ctx.region()
        if region is None or gradient is None:
            return None, gradient
        fenced = region.replay_behind(gradient)
        # A backward that is differentiated itself sums up along its own graph, which has to be that of the plain one.
        return None, gradient if torch.is_grad_enabled() else fenced


def through_exit(region: Any, result: Any, capture: Capture) -> Any:
    """`result`, with what the region computed handed out by its exit.

    Not what the caller has already, an argument or a view of one, and not what another output was computed from: it is a
    place inside of the region, where a backward may begin or end.
    """
    if is_function_mode_active():
        modes = [mode for mode in function_modes() if isinstance(mode, Aliases)]
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
    computed = {
        id(leaf): leaf
        for leaf in leaves
        if isinstance(leaf, Tensor)
        and leaf.grad_fn is not None
        and leaf.device.type in known
        and id(_base_of(leaf)) not in given
        and not _base_of(leaf).is_leaf
    }
    source_of = _sources(computed.values())
    sources = {id(source): source for source in source_of.values()}
    last = _last(sources, capture) if len(sources) > 1 else sources
    handed = {key: Exit.apply(region, source) for key, source in last.items()}
    new: dict[int, Tensor] = {}
    for key, leaf in computed.items():
        source = source_of[key]
        if id(source) in handed:
            new[key] = handed[key] if source is leaf else view_again(leaf, handed[id(source)])
    return unflatten([new.get(id(leaf), leaf) for leaf in leaves], structure) if new else result


def _last(sources: dict[int, Tensor], capture: Capture) -> dict[int, Tensor]:
    """Those that none of the others was computed from."""
    todo = [node for tensor in sources.values() for node, _ in tensor.grad_fn.next_functions]  # type: ignore[union-attr]
    seen: set[Any] = {tensor.grad_fn for tensor, _ in capture.tensors}  # what is before the region is not looked at
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            todo += [before for before, _ in node.next_functions]
    return {key: tensor for key, tensor in sources.items() if tensor.grad_fn not in seen}


def _sources(outputs: Iterable[Tensor]) -> dict[int, Tensor]:
    """What goes through an exit, by the id of the output: the output, or the memory that several are views of."""
    groups: dict[int, list[Tensor]] = {}
    for tensor in outputs:
        groups.setdefault(id(_base_of(tensor)), []).append(tensor)
    sources: dict[int, Tensor] = {}
    for group in groups.values():
        # Parts that one op cut (`chunk`) may not be written to, so that nobody can tell whether they share memory.
        are_parts = len({tensor.grad_fn for tensor in group}) < len(group)
        is_alone = len(group) == 1 or are_parts
        sources |= {id(tensor): tensor if is_alone else _base_of(tensor) for tensor in group}
    return sources


def _base_of(tensor: Tensor) -> Tensor:
    return tensor if tensor._base is None else tensor._base


# -- the replay -------------------------------------------------------------------------------------------------------


class FencedReplay:
    """What one replay reads, behind a fence.

    Args:
        device_type: of the tensors that need it.
        fence: the device's.
        gradient: of an output, where a backward comes through its exit.

    Attributes:
        gradient: once the replay has begun, the same behind the fence.
    """

    def __init__(self, device_type: str, fence: Fence, gradient: Tensor | None = None) -> None:
        self._device_type = device_type
        self._fence = fence
        self.gradient = gradient
        self._given: Memo = {}

    def read(self, record: Any) -> None:
        """Get the arguments: a region around this one may have to be replayed for them, as long as all is as it is.

        Raises:
            RuntimeError: autograd's own, where one of them was written to since.
        """
        self._given = {id(form): rebuild(form, {}) for form in record.entries}

    @contextmanager
    def standing(self, record: Any) -> Iterator[Memo]:
        """Aliases of the arguments, by their forms; inside, everything else that is there already is read by alias."""
        with Aliases({self._device_type: self._fence}) as aliases:
            with without_function_modes():
                memo = self._raise(record, aliases)
            try:
                yield memo
            finally:
                if self.gradient is not None and aliases.token is not None:
                    self.gradient = aliases.token

    def _raise(self, record: Any, aliases: Aliases) -> Memo:
        memo, self._given = self._given, {}
        aliases.leave(_written(record))
        named = {id(tensor): tensor for tensor in _named(record) if self._is_concerned(tensor)}
        given = [key for key, tensor in memo.items() if self._is_concerned(tensor)]
        gradient = [] if self.gradient is None or not self._is_concerned(self.gradient) else [self.gradient]
        made = run_unseen(self._fence, [*gradient, *(memo[key] for key in given), *named.values()])
        fenced = iter(made)
        aliases.token = next(fenced) if gradient else None
        for key in given:
            memo[key] = alias_like(memo[key], next(fenced))
        aliases.own(memo[key] for key in given)
        for tensor, alias in zip(named.values(), fenced):
            aliases.put(tensor, alias)
        return memo

    def _is_concerned(self, tensor: Tensor) -> bool:
        return tensor.device.type == self._device_type


def _written(record: Any) -> Iterator[Tensor]:
    """What was written to since: whoever refuses that it is read has to see that it is."""
    for tensor in tensors_of(record.modules):
        if record.versions.get(id(tensor), tensor._version) != tensor._version:
            yield tensor


def _named(record: Any) -> Iterator[Tensor]:
    """What the replay will find by name."""
    for tensor in tensors_of(record.modules):
        if record.versions.get(id(tensor), tensor._version) == tensor._version:
            yield _whole(tensor)
    for watched in record.watched:
        value = watched.namespace.get(watched.name)
        if isinstance(value, Tensor):
            yield _whole(value)


def tensors_of(modules: Iterable[Module]) -> Iterator[Tensor]:
    """Parameters and buffers."""
    for module in modules:
        for registry in (module._parameters, module._buffers):
            yield from (tensor for tensor in registry.values() if tensor is not None)


def _whole(tensor: Tensor) -> Tensor:
    """What state is a view of: what is written to one view of it is read through the others."""
    return tensor if tensor.requires_grad else _base_of(tensor)


def alias_like(tensor: Tensor, alias: Tensor) -> Tensor:
    """`alias` with the place in a graph that `tensor` has: a leaf where it is one."""
    if not tensor.requires_grad:
        return alias
    alias.requires_grad_()
    with torch.enable_grad():
        return alias if tensor.is_leaf else run_unseen(alias.clone)


class Aliases(TorchFunctionMode):
    """A context that gives every call of torch's functions aliases of the tensors that were there before.

    What is made inside bears a mark. Anything else is looked up, and put behind the fence when it comes as a surprise: a
    tensor in an attribute of some object, what a saved call kept.

    Args:
        known: {device type: its fence}.
    """

    def __init__(self, known: Mapping[str, Fence]) -> None:
        self._fences = known
        self._aliases: dict[int, tuple[Tensor, Tensor]] = {}  # by the id of the original, which has to stay alive
        self._left: set[int] = set()
        self.token: Tensor | None = None  # the gradient behind the last fence: a surprise waits for it as well
        self._mark = object()
        self.are_versions_kept = False

    def __enter__(self) -> Aliases:
        push_function_mode(self)
        return self

    def __exit__(self, *details: object) -> None:
        pop_function_mode()
        # Hold nothing: what is still there when the device cuts off its graph becomes an output of it.
        self._aliases = {}
        self.token = None

    def put(self, tensor: Tensor, alias: Tensor) -> None:
        """Read `alias`, which stands behind a fence, for `tensor`."""
        self._aliases[id(tensor)] = tensor, alias_like(tensor, alias)

    def leave(self, tensors: Iterable[Tensor]) -> None:
        """Let these be read as they are."""
        self._left.update(map(id, tensors))

    def own(self, tensors: Iterable[Any]) -> None:
        """These are as if made inside."""
        for tensor in tensors:
            if isinstance(tensor, Tensor):
                tensor._reactivate_replay = self._mark  # type: ignore[attr-defined]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in _ACCESSORS and func not in _READS:
            return func(*args, **kwargs)
        with without_function_modes():  # these looks are not the user's
            args, kwargs = self._aliased(args), self._aliased(kwargs)
            written = tuple(tensors_in(args, kwargs)) if self.are_versions_kept else ()
        with preserve_versions(written) if written else nullcontext():
            result = func(*args, **kwargs)
        with without_function_modes():
            self.own(tensors_in((result,), {}))
        return result

    def _aliased(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._alias_of(value) if self._is_concerned(value) else value
        if isinstance(value, (list, tuple)) and any(map(self._is_concerned, tensors_in(value, {}))):
            items = [self._aliased(item) for item in value]
            return getattr(type(value), "_make", type(value))(items)
        if isinstance(value, dict) and any(map(self._is_concerned, tensors_in((), value))):
            return {name: self._aliased(item) for name, item in value.items()}
        return value

    def _is_concerned(self, tensor: Tensor) -> bool:
        is_own = getattr(tensor, "_reactivate_replay", None) is self._mark
        return tensor.device.type in self._fences and not is_own and id(tensor) not in self._left

    def _alias_of(self, tensor: Tensor) -> Tensor:
        whole = _whole(tensor)
        if whole is not tensor:
            return view_again(tensor, self._alias_of(whole))
        if id(tensor) not in self._aliases:
            self.put(tensor, self._behind_token(tensor))
        return self._aliases[id(tensor)][1]

    def _behind_token(self, tensor: Tensor) -> Tensor:
        """An alias that waits for the token. The token goes on from there: of a fence, what nobody reads may be dropped."""
        fence = self._fences[tensor.device.type]
        if self.token is None or self.token.device != tensor.device:
            return run_unseen(fence, [tensor])[0]  # type: ignore[no-any-return]
        alias, self.token = run_unseen(fence, [tensor, self.token])
        return alias  # type: ignore[no-any-return]


@contextmanager
def seen_by_aliases() -> Iterator[None]:
    """What a replay brings about, it writes to aliases too, where there are any; without new versions, unseen by others."""
    modes = function_modes()
    aliases = [mode for mode in modes if isinstance(mode, Aliases)]
    replace_function_modes(tuple(aliases))
    try:
        for mode in aliases:
            mode.are_versions_kept = True
        yield
    finally:
        for mode in aliases:
            mode.are_versions_kept = False
        replace_function_modes(modes)


_ACCESSORS = frozenset({"__get__", "__set__", "__delete__"})
_ATTRIBUTES: Any = [getattr(Tensor, name) for name in ("T", "mT", "H", "mH", "real", "imag", "data")]
_READS: frozenset[Callable[..., Any]] = frozenset(attribute.__get__ for attribute in _ATTRIBUTES)
"""Accessors that give out what is in the tensor. Others are about the object: its shape, its gradient, its hooks."""

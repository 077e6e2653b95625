"""Aliases: what a recomputation reads in the place of tensors that were there before, on devices with a fence."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from reactivate._backends import Fence, NumberingFence
from reactivate._engine.kept_calls.site_log import tensors_in
from reactivate._engine.state.contents import ATOMS
from reactivate._torch.fake import STAND_INS
from reactivate._torch.modes import (
    function_modes,
    is_aot_tracing,
    is_function_mode_active,
    pop_function_mode,
    push_function_mode,
    replace_function_modes,
    run_unseen,
    without_function_modes,
)
from reactivate._torch.versions import preserve_versions, view_again


class Aliases(TorchFunctionMode):
    """A context that gives every call of torch's functions aliases of the tensors that were there before.

    Tensors that are made inside are known by their numbers, where the device has any, and otherwise by a list beside them: an
    attribute would be the user's to see, and a saved call's result with attributes is not kept. Anything else is looked up,
    and put behind the fence when it comes as a surprise: a tensor in an attribute of some object, what a saved call kept.
    What AOTAutograd traces with is left alone: it has no values.

    Args:
        known: {device type: its fence}.
    """

    def __init__(self, known: Mapping[str, Fence]) -> None:
        self._fences = known
        self._number_of = {kind: fence.number_of for kind, fence in known.items() if isinstance(fence, NumberingFence)}
        self._first: dict[str, int] = {}  # by device type: the number of the first tensor that is made inside
        self._are_all_numbered = len(self._number_of) == len(known)
        self._aliases: dict[int, tuple[Tensor, Tensor]] = {}  # by the id of the original, which has to stay alive
        self._left: set[int] = set()
        self.token: Tensor | None = None  # the gradient behind the last fence: a surprise waits for it as well
        self._made: dict[int, ref[Tensor]] = {}  # by the id of what is made inside
        self.are_versions_kept = False

    def __enter__(self) -> Aliases:
        for kind in self._number_of.keys() - self._first.keys():
            self.begin_at(torch.empty((), device=kind))
        push_function_mode(self)
        return self

    def __exit__(self, *details: object) -> None:
        pop_function_mode()
        # Hold nothing: what is still there when the device cuts off its graph becomes an output of it.
        self._aliases, self._made, self._first = {}, {}, {}
        self.token = None

    def begin_at(self, tensor: Tensor) -> None:
        """Take `tensor` for the first of its device that is made inside, if the device has numbers."""
        kind = tensor.device.type
        if kind in self._number_of:
            self._first[kind] = self._number_of[kind](tensor)

    def put(self, tensor: Tensor, alias: Tensor) -> None:
        """Read `alias`, which stands behind a fence, for `tensor`."""
        self._aliases[id(tensor)] = tensor, alias_like(tensor, alias)

    def leave(self, tensors: Iterable[Tensor]) -> None:
        """Let these be read as they are."""
        self._left.update(map(id, tensors))

    def own(self, tensors: Iterable[Any]) -> None:
        """These are as if made inside."""
        if self._are_all_numbered:
            return
        for tensor in tensors:
            if isinstance(tensor, Tensor):
                self._made[id(tensor)] = ref(tensor)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        is_about_object = getattr(func, "__name__", "") in _ACCESSORS and func not in _READS
        if is_about_object or is_aot_tracing():
            return func(*args, **kwargs)
        if is_function_mode_active():  # these looks are not for modes of the user's
            with without_function_modes():
                args, kwargs = self._aliased_all(args), self._aliased(kwargs)
        else:
            args, kwargs = self._aliased_all(args), self._aliased(kwargs) if kwargs else kwargs
        if self.are_versions_kept:
            with preserve_versions(tuple(tensors_in(args, kwargs))):
                result = func(*args, **kwargs)
        else:
            result = func(*args, **kwargs)
        if not self._are_all_numbered:
            with without_function_modes():
                self.own(tensors_in((result,), {}))
        return result

    def _aliased_all(self, values: Sequence[Any]) -> Sequence[Any]:
        found: list[Any] | None = None
        for index, value in enumerate(values):
            if type(value) in ATOMS:
                continue
            alias = self._aliased(value)
            if alias is not value:
                if found is None:
                    found = list(values)
                found[index] = alias
        return values if found is None else found

    def _aliased(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            known = self._aliases.get(id(value))
            if known is not None:
                return known[1]
            return self._alias_of(value) if self._is_concerned(value) else value
        if isinstance(value, (list, tuple)):
            items = self._aliased_all(value)
            return value if items is value else getattr(type(value), "_make", type(value))(items)
        if isinstance(value, dict):
            values = tuple(value.values())
            items = self._aliased_all(values)
            return value if items is values else dict(zip(value, items))
        return value

    def _is_concerned(self, tensor: Tensor) -> bool:
        kind = tensor.device.type
        if kind not in self._fences or isinstance(tensor, STAND_INS):
            return False
        number_of = self._number_of.get(kind)
        if number_of is not None:
            is_own = number_of(tensor) >= self._first[kind]
        else:
            made = self._made.get(id(tensor))
            is_own = made is not None and made() is tensor
        return not is_own and id(tensor) not in self._left

    def _alias_of(self, tensor: Tensor) -> Tensor:
        whole = whole_of(tensor)
        if whole is not tensor:
            known = self._aliases.get(id(whole))
            return view_again(tensor, self._alias_of(whole) if known is None else known[1])
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
    """Let a recomputation write what it restores to aliases too, without new versions and unseen by other modes."""
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


def base_of(tensor: Tensor) -> Tensor:
    """Return the base of a view, or the tensor itself."""
    return tensor if tensor._base is None else tensor._base


def whole_of(tensor: Tensor) -> Tensor:
    """Return the base of state: what is written to one view is read through the others."""
    return tensor if tensor.requires_grad else base_of(tensor)


def alias_like(tensor: Tensor, alias: Tensor) -> Tensor:
    """`alias` with the place in a graph that `tensor` has, a leaf where it is one, and with its Python attributes."""
    if tensor.requires_grad:
        alias.requires_grad_()
        if not tensor.is_leaf:
            with torch.enable_grad():
                alias = run_unseen(alias.clone)
    attributes = vars(tensor)
    if attributes:
        vars(alias).update(attributes)
    return alias

"""Aliases: what a recomputation reads in the place of tensors that were there before, on devices with a fence."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from reactivate._backends import Fence, WatchingFence
from reactivate._engine.kept_calls.site_log import tensors_in
from reactivate._torch.fake import STAND_INS
from reactivate._torch.modes import (
    function_modes,
    is_aot_tracing,
    pop_function_mode,
    push_function_mode,
    replace_function_modes,
    run_unseen,
    without_function_modes,
)
from reactivate._torch.versions import preserve_versions, view_again


class Aliases(TorchFunctionMode):
    """A context that gives every call of torch's functions aliases of the tensors that were there before.

    What is made inside is known, beside the tensors: an attribute would be the user's to see, and a saved call's result
    with attributes is not kept. Anything else is looked up, and put behind the fence when it comes as a surprise: a tensor
    in an attribute of some object, what a saved call kept. What AOTAutograd traces with is left alone: it has no values.

    Args:
        known: {device type: its fence}.
    """

    def __init__(self, known: Mapping[str, Fence]) -> None:
        self._fences = known
        self._is_new = {kind: fence.begin_watch() for kind, fence in known.items() if isinstance(fence, WatchingFence)}
        self._aliases: dict[int, tuple[Tensor, Tensor]] = {}  # by the id of the original, which has to stay alive
        self._left: set[int] = set()
        self.token: Tensor | None = None  # the gradient behind the last fence: a surprise waits for it as well
        self._made: dict[int, ref[Tensor]] = {}  # by the id of what is made inside
        self.are_versions_kept = False

    def __enter__(self) -> Aliases:
        push_function_mode(self)
        return self

    def __exit__(self, *details: object) -> None:
        pop_function_mode()
        # Hold nothing: what is still there when the device cuts off its graph becomes an output of it.
        self._aliases, self._made = {}, {}
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
                self._made[id(tensor)] = ref(tensor)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        is_about_object = getattr(func, "__name__", "") in _ACCESSORS and func not in _READS
        if is_about_object or is_aot_tracing():
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
        made = self._made.get(id(tensor))
        is_own = made is not None and made() is tensor
        is_left = is_own or id(tensor) in self._left or isinstance(tensor, STAND_INS)
        return tensor.device.type in self._fences and not is_left

    def _alias_of(self, tensor: Tensor) -> Tensor:
        whole = whole_of(tensor)
        if whole is not tensor:
            return view_again(tensor, self._alias_of(whole))
        if id(tensor) not in self._aliases:
            if self._is_of_library(tensor):
                self.own((tensor,))
                return tensor
            self.put(tensor, self._behind_token(tensor))
        return self._aliases[id(tensor)][1]

    def _is_of_library(self, tensor: Tensor) -> bool:
        """Return whether another library's code has made it inside: no function of torch's was seen to."""
        is_new = self._is_new.get(tensor.device.type)
        return is_new is not None and is_new(tensor)

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

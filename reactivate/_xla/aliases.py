"""Aliases: what a recomputation of torch's own checkpoint reads in the place of tensors that were there before."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any
from weakref import ref

from torch import Tensor
from torch.overrides import TorchFunctionMode

from reactivate._torch.asking import asking
from reactivate._torch.autograd import base_of, view_again
from reactivate._torch.modes import STAND_INS, is_aot_tracing, run_unseen, without_function_modes
from reactivate._torch.ops import flatten, tensors_in, unflatten
from reactivate._xla.fence import Fence
from reactivate._xla.recomputation import alias_like

_ACCESSORS = frozenset({"__get__", "__set__", "__delete__"})
_ATTRIBUTES: Any = [getattr(Tensor, name) for name in ("T", "mT", "H", "mH", "real", "imag", "data")]
_READS: frozenset[Callable[..., Any]] = frozenset(attribute.__get__ for attribute in _ATTRIBUTES)
"""Accessors that give out what is in the tensor. Others are about the object: its shape, its gradient, its hooks."""


class Aliases(TorchFunctionMode):
    """A context that gives every call of torch's functions aliases of the tensors that were there before.

    Tensors that are made inside are known by a list beside them: an attribute would be the user's to see. What AOTAutograd
    traces with is left alone: it has no values.

    Args:
        known: {device type: its fence}.
    """

    def __init__(self, known: Mapping[str, Fence]) -> None:
        self._fences = known
        self._aliases: dict[int, tuple[Tensor, Tensor]] = {}  # by the id of the original, which has to stay alive
        self._made: dict[int, ref[Tensor]] = {}  # by the id of what is made inside

    def __exit__(self, *details: Any) -> None:
        super().__exit__(*details)
        # Hold nothing: what is still there when the device cuts off its graph becomes an output of it.
        self._aliases, self._made = {}, {}

    def own(self, tensors: Iterable[Tensor]) -> None:
        """These are as if made inside."""
        self._made.update((id(tensor), ref(tensor)) for tensor in tensors)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func = asking(func, kwargs)
        kwargs = kwargs or {}
        is_about_object = getattr(func, "__name__", "") in _ACCESSORS and func not in _READS
        if is_about_object or is_aot_tracing():
            return func(*args, **kwargs)
        with without_function_modes():  # these looks are not for modes of the user's
            leaves, structure = flatten((args, kwargs))
            leaves = [self._alias_of(leaf) if self._is_concerned(leaf) else leaf for leaf in leaves]
            args, kwargs = unflatten(leaves, structure)
        result = func(*args, **kwargs)
        with without_function_modes():
            self.own(tensors_in((result,), {}))
        return result

    def _is_concerned(self, value: Any) -> bool:
        if not isinstance(value, Tensor) or isinstance(value, STAND_INS) or value.device.type not in self._fences:
            return False
        made = self._made.get(id(value))
        return made is None or made() is not value

    def _alias_of(self, tensor: Tensor) -> Tensor:
        known = self._aliases.get(id(tensor))
        if known is None:
            # Of state, the base: what is written to one view is read through the others.
            whole = tensor if tensor.requires_grad else base_of(tensor)
            if whole is not tensor:
                return view_again(tensor, self._alias_of(whole))
            alias = alias_like(tensor, run_unseen(self._fences[tensor.device.type], [tensor])[0])
            known = self._aliases[id(tensor)] = tensor, alias
        return known[1]

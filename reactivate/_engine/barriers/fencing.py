"""Recomputations behind a fence, on devices whose compiler would merge them with the forward pass (see `_backends/fence.py`).

Two things keep them apart. What goes out of a region goes through an exit (see `exits`), which gets the gradient before
anything in the region needs it. The first exit that a backward comes to puts this gradient and whatever the recomputation
will read behind one fence, and recomputes the region there: no part of it can run before its backward begins. And the
recomputation reads aliases: of the arguments, which are rebuilt for it anyway, and of parameters, buffers and whatever else
is there before it, which a function mode puts in their place (see `aliases`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.nn import Module

from reactivate._backends import Fence, fences
from reactivate._engine.barriers.aliases import Aliases, alias_like, whole_of
from reactivate._engine.inputs.specs import Memo, rebuild
from reactivate._engine.kept_calls.site_log import tensors_in
from reactivate._engine.state.held import WeakTensor
from reactivate._torch.modes import run_unseen, without_function_modes


def fence_of(tensors: Iterable[Tensor]) -> tuple[str, Fence] | None:
    """The device type of the first of `tensors` that needs a fence, and the fence."""
    known = fences()
    for tensor in tensors:
        kind = tensor.device.type
        if kind in known:
            return kind, known[kind]
    return None


class FencedRecomputation:
    """The tensors that one recomputation reads, behind a fence.

    Args:
        device_type: of the tensors that need it.
        fence: the device's.
        gradient: of an output, where a backward comes through its exit.

    Attributes:
        gradient: once the recomputation has begun, the same behind the fence.
    """

    def __init__(self, device_type: str, fence: Fence, gradient: Tensor | None = None) -> None:
        self._device_type = device_type
        self._fence = fence
        self.gradient = gradient
        self._given: Memo = {}

    def read(self, record: Any) -> None:
        """Get the arguments: a region around this one may have to be recomputed for them, as long as all is as it is.

        Raises:
            RuntimeError: autograd's own, where one of them was written to since.
        """
        replaced = record.replaced
        self._given = {id(form): rebuild(replaced.get(id(form), form), {}) for form in record.entries}

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
        # Whoever refuses that something written to is read has to see that it is.
        aliases.leave(tensor for tensor in tensors_of(record.modules) if _is_written(record, tensor))
        stale = [_tensor_of(item) for item in record.inputs if item.tensor._version != item.version]
        aliases.leave(stale)
        named = {id(tensor): tensor for tensor in _named(record) if self._is_concerned(tensor)}
        left = set(map(id, stale))
        given = [key for key, tensor in memo.items() if self._is_concerned(tensor) and id(tensor) not in left]
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


def _is_written(record: Any, tensor: Tensor) -> bool:
    """Return whether a tensor of a module was written to since."""
    return bool(record.versions.get(id(tensor), tensor._version) != tensor._version)


def _named(record: Any) -> Iterator[Tensor]:
    """List the tensors that the recomputation will find by name, and may read."""
    for tensor in tensors_of(record.modules):
        if not _is_written(record, tensor):
            yield whole_of(tensor)
    for item in record.inputs:
        if isinstance(item.tensor, Tensor) and item.tensor._version == item.version:
            yield whole_of(item.tensor)


def _tensor_of(item: Any) -> Tensor:
    return item.tensor.get() if isinstance(item.tensor, WeakTensor) else item.tensor


def tensors_of(modules: Iterable[Module]) -> Iterator[Tensor]:
    """Parameters and buffers."""
    for module in modules:
        for registry in (module._parameters, module._buffers):
            yield from (tensor for tensor in registry.values() if tensor is not None)


def given_tensors(capture: Any) -> list[Tensor]:
    """Return the tensors among the arguments of a region and in closures."""
    arguments = tensors_in(capture.args, capture.kwargs)
    return list({id(tensor): tensor for tensor in (*(item[0] for item in capture.saved), *arguments)}.values())

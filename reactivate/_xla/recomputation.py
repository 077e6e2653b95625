"""Recomputations behind a fence, on devices whose compiler would merge them with the forward pass (see `fence`).

Two things keep them apart. What goes out of a region goes through an exit (see `exits`), which gets the gradient before
anything in the region needs it. The first exit that a backward comes to puts this gradient and what the recomputation will
read behind one fence, and recomputes the region there: no part of it can run before its backward begins. And the
recomputation reads aliases: of the arguments, which are rebuilt for it anyway; and of parameters, buffers and other tensors
that the region can reach, which have the memory of their aliases until it is over, so that they stay the same objects.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from reactivate._torch.modes import run_unseen
from reactivate._xla.fence import Fence

_PLAIN = Tensor, Parameter


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
        self._given: dict[int, Any] = {}
        self._moved: Sequence[tuple[Tensor, Tensor, Tensor]] = ()  # each with its own memory, and that of its alias

    def read(self, region: Any, rebuild: Callable[[Any, dict[int, Any]], Any]) -> None:
        """Get the arguments: a region around this one may have to be recomputed for them, as long as all is as it is.

        Raises:
            RuntimeError: autograd's own, where one of them was written to since.
        """
        self._given = {id(form): rebuild(region.replaced.get(id(form), form), {}) for form in region.entries}

    def begin(self, region: Any) -> dict[int, Any]:
        """Let tensors that the region can reach have the memory of aliases. Return aliases of arguments, by their forms."""
        return run_unseen(self._begin, region)  # type: ignore[no-any-return]

    def _begin(self, region: Any) -> dict[int, Any]:
        memo, self._given = self._given, {}
        # Those that were written to since are left as they are, for the check that refuses to read them.
        named = [tensor for tensor, version in region.named if tensor._version == version]
        written = {id(item.tensor) for item in region.inputs if item.tensor._version != item.version}
        given = [key for key, tensor in memo.items() if self._is_concerned(tensor) and id(tensor) not in written]
        own = [tensor.data for tensor in named]
        aliases = iter(self._fenced([*(memo[key] for key in given), *named]))
        for key in given:
            memo[key] = alias_like(memo[key], next(aliases))
        self._moved = list(zip(named, own, aliases))
        for tensor, _, alias in self._moved:
            tensor.data = alias
        return memo

    def end(self) -> None:
        """Give the tensors their own memory again."""
        run_unseen(self._move_back)

    def _move_back(self) -> None:
        moved, self._moved = self._moved, ()
        for tensor, own, _ in moved:
            tensor.data = own

    def fenced(self, results: Sequence[Any]) -> list[Any]:
        """Return results of saved calls as the recomputation reads them."""
        return run_unseen(self._fenced_among, results)  # type: ignore[no-any-return]

    def _fenced_among(self, values: Sequence[Any]) -> list[Any]:
        given = {at: item for at, item in enumerate(values) if isinstance(item, Tensor) and self._is_concerned(item)}
        aliases = dict(zip(given, self._fenced(list(given.values()))))
        return [alias_like(item, aliases[at]) if at in aliases else item for at, item in enumerate(values)]

    def _fenced(self, tensors: list[Tensor]) -> list[Tensor]:
        """Return aliases that wait for the gradient. It goes on from there: of a fence, what is not read may be dropped."""
        if self.gradient is None or not self._is_concerned(self.gradient):
            return self._fence(tensors) if tensors else []
        self.gradient, *aliases = self._fence([self.gradient, *tensors])
        return aliases

    def _is_concerned(self, tensor: Tensor) -> bool:
        return tensor.device.type == self._device_type


def alias_like(tensor: Tensor, alias: Tensor) -> Tensor:
    """`alias` with the place in a graph that `tensor` has, a leaf where it is one, and with its Python attributes."""
    if tensor.requires_grad:
        alias.requires_grad_()
        if not tensor.is_leaf:
            with torch.enable_grad():
                alias = run_unseen(alias.clone)
    if vars(tensor):
        vars(alias).update(vars(tensor))
    return alias


def named_tensors(call: Any) -> list[tuple[Tensor, int]]:
    """Return what a recomputation can reach by name, with its version: parameters, buffers, and what the walk has found."""
    tree = call.tree
    modules = () if tree is None else (*tree.parts.entries, *tensors_of(tree.scripted), *tree.tensors)
    reached = (item.tensor for item in call.inputs)
    found = {id(item): item for item in (*modules, *reached, *call.tensors)}
    return [(item, item._version) for item in found.values() if type(item) in _PLAIN and not item.is_inference()]


def unwritten(named: Iterable[tuple[Tensor, int]], device_type: str) -> list[tuple[Tensor, int]]:
    """Return those that may have the memory of an alias for the time of a recomputation.

    Not what the forward has written to or may have written to unseen, as batch norm does: other tensors may share its
    memory, and would not see what the recomputation writes.
    """
    return [
        (tensor, version)
        for tensor, version in named
        if tensor._version == version
        and tensor.device.type == device_type
        and tensor.is_leaf
        and tensor._base is None
        and (tensor.requires_grad or tensor.ndim != 1)
    ]


def tensors_of(modules: Iterable[Module]) -> Iterator[Tensor]:
    """Parameters and buffers."""
    for module in modules:
        for registry in (module._parameters, module._buffers):
            yield from (tensor for tensor in registry.values() if tensor is not None)

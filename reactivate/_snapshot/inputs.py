"""Inputs of a region: how its arguments are kept until a recomputation, and how that gets them again.

Most values are kept as they are: the recomputation gets the same object. A tensor that has or requires a gradient is kept
as a saved tensor of autograd's own, outside of the region's hooks, so that a region around this one, or an offloader, sees
it (Rules 7, 9) and autograd checks its version. What has a class here is made anew for each recomputation.
"""

from __future__ import annotations

from collections.abc import Iterator
from inspect import GEN_CLOSED, GEN_CREATED, getgeneratorstate
from types import GeneratorType
from typing import Any, NamedTuple
from weakref import ref

from torch import Tensor
from torch.nn import Parameter

from reactivate._snapshot.geometry import memory_of
from reactivate._snapshot.iterators import copied
from reactivate._torch.autograd import SavedTensor, as_a_result, save_tensor
from reactivate.errors import UnsupportedError

Memo = dict[int, Any]


def rebuild(spec: Any, memo: Memo) -> Any:
    """Return the value that `spec` stands for in the recomputation that `memo` belongs to.

    Raises:
        RuntimeError: autograd's own, where a tensor was modified in place since.
    """
    if type(spec) is SavedTensor:
        key = id(spec)
        if key not in memo:
            memo[key] = spec.unpack()
        return memo[key]
    if not isinstance(spec, InputSpec):
        return memo.get(id(spec), spec) if memo and isinstance(spec, Tensor) else spec
    key = id(spec)
    if key not in memo:
        memo[key] = spec.rebuild(memo)
    return memo[key]


class Input(NamedTuple):
    """A tensor that the recomputation reads where it is.

    Attributes:
        tensor: the tensor, or a `WeakTensor`.
        version: at the beginning of the region.
        place: where it was found.
        is_constant: whether it required no gradient then.
    """

    tensor: Any
    version: int
    place: str
    is_constant: bool


class InputSpec:
    """A value that each recomputation gets anew."""

    __slots__ = ()

    def rebuild(self, memo: Memo) -> Any:
        """Return the value."""
        raise NotImplementedError

    def children(self) -> Iterator[tuple[str, Any]]:
        """Return (how the part is written after the whole, its spec) of each part."""
        return iter(())


class SavedInput(InputSpec):
    """A tensor under saved-tensor hooks: the original, as long as it lives unmodified, or what the hooks give.

    Hooks of the user's always give it, as an offloader may use the memory of what it has packed for something else, and
    count what it unpacks. Only a parameter stays the original, since code asks for its class.

    What hooks give back in other memory counts its own versions: it may have been written to when it was read from a file.

    Args:
        tensor: the tensor.
        is_users: whether the hooks are the user's.

    Attributes:
        saved: autograd's saved tensor.
    """

    __slots__ = ("_attributes", "_memory", "_original", "_version", "saved")

    def __init__(self, tensor: Tensor, *, is_users: bool) -> None:
        self.saved = save_tensor(tensor, False)
        self._original = None if is_users and not isinstance(tensor, Parameter) else ref(tensor)
        self._version = tensor._version
        self._attributes = dict(vars(tensor))
        # A weak reference of Python: on torch 2.9 one of C++ keeps the storage's object, and the planner sees no end of it.
        self._memory = None if memory_of(tensor) is None else ref(tensor.untyped_storage())

    def rebuild(self, memo: Memo) -> Tensor:
        original = None if self._original is None else self._original()
        if original is not None and original._version == self._version:
            return original
        tensor: Tensor = self.saved.unpack()
        if tensor._version > self._version and self._is_elsewhere(tensor):
            tensor = _uncounted(tensor)
        if self._attributes and tensor is not original:
            vars(tensor).update(self._attributes)
        return tensor

    def _is_elsewhere(self, tensor: Tensor) -> bool:
        if self._memory is None:
            return False
        return memory_of(tensor) is None or self._memory() is not tensor.untyped_storage()


def _uncounted(tensor: Tensor) -> Tensor:
    """Return an alias whose version counts from 0."""
    alias = tensor.data
    if not tensor.requires_grad:
        return alias
    return alias.requires_grad_() if tensor.is_leaf else as_a_result(alias)


class WrittenInput(InputSpec):
    """An argument with a gradient that the region itself wrote to: its values as the region left them.

    The region holds no graph of its own, so this is an alias without one.
    """

    __slots__ = ("alias", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.alias = tensor.detach()
        self.version = tensor._version

    def rebuild(self, memo: Memo) -> Tensor:
        if self.alias._version != self.version:
            raise RuntimeError("an argument that the region wrote to has been modified by an inplace operation since")
        return as_a_result(self.alias.clone())


class Constant(WrittenInput):
    """A tensor without a gradient that the region made part of the graph: a recomputation gets an alias that is in none.

    Attributes:
        now: the alias of the recomputation that runs now.
    """

    __slots__ = ("now",)

    def rebuild(self, memo: Memo) -> Tensor:
        self.now = self.alias.detach()
        return self.now


class TupleInput(InputSpec):
    """A tuple that holds an iterator, or tensors under saved-tensor hooks: as it is, it would keep what these have moved."""

    __slots__ = ("_items", "_kind")

    def __init__(self, kind: type, items: list[Any]) -> None:
        self._kind = kind
        self._items = items

    def rebuild(self, memo: Memo) -> Any:
        make = getattr(self._kind, "_make", self._kind)  # a named tuple's class takes its fields one by one
        return make([rebuild(item, memo) for item in self._items])

    def children(self) -> Iterator[tuple[str, Any]]:
        for index, item in enumerate(self._items):
            yield f"[{index}]", item


class GeneratorInput(InputSpec):
    """A generator. It cannot be copied, so it is passed on if it has not begun.

    Of one that has begun before, it cannot be told whether it has gone on since.
    """

    __slots__ = ("_generator", "_place", "_state")

    def __init__(self, generator: GeneratorType[Any, Any, Any], place: str) -> None:
        self._generator = generator
        self._place = place
        self._state = getgeneratorstate(generator)

    def rebuild(self, memo: Memo) -> Any:
        if self._state not in (GEN_CREATED, GEN_CLOSED) or getgeneratorstate(self._generator) != self._state:
            raise UnsupportedError(
                f"A generator ({self._generator.__qualname__}) was passed to a checkpointed function as {self._place}. The "
                "forward goes through it, so the recomputation would find it used up. Pass a list of its items instead."
            )
        return self._generator


class IteratorInput(InputSpec):
    """An iterator as it was: the forward uses it up."""

    __slots__ = ("_copy",)

    def __init__(self, iterator: Any) -> None:
        self._copy = copied(iterator)

    def rebuild(self, memo: Memo) -> Any:
        return copied(self._copy)

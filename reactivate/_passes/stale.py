"""Stale tensors: modified since the forward read them, without a copy of what they held (Rule 15).

A function may reach more than it reads, and read more than its gradients need: a bound method reaches its whole model, of
which an optimizer may step a part before this backward; a log that every region writes one entry of is read by none; a bias
is added to what no op saves. So where anything is stale, the ops of a recomputation are watched. What an op computes from
stale memory is stale itself, and only a stale tensor that autograd saves is refused, or a stale number that Python gets,
since it may decide what is computed next. Mostly nothing is stale, and there is no watch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextvars import ContextVar
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from reactivate._snapshot.geometry import memory_of
from reactivate._torch.asking import asking
from reactivate._torch.autograd import innermost_pack_hook
from reactivate._torch.dynamo import DispatchMode
from reactivate._torch.ops import call_counted, is_view, leaves_at_op, written_values
from reactivate.errors import MutationError

_FILLS = frozenset({"copy_", "fill_", "zero_", "normal_", "uniform_", "bernoulli_", "set_"})
"""Ops in place that do not read what they write to."""

_GIVES_NUMBERS = frozenset({Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__dlpack__, Tensor.data_ptr})
"""Ways to the elements of a tensor that are no ops."""

watches: list[StaleReads] = []
"""Active watches of all threads: mostly none, which is asked for every saved tensor."""

_around: ContextVar[tuple[StaleReads, ...]] = ContextVar("reactivate.stale_reads", default=())
"""The active watches around the code that runs, also on a thread that runs a backward for it."""


class StaleReads(DispatchMode):
    """Refuses to save what comes from one of `tensors`, which have been modified, or from memory of theirs.

    Memory that the recomputation itself has filled may be read, in the same shape.

    Args:
        refuse: makes the error for one of them.

    Raises:
        MutationError: from the op; and from the end of the context, if the function has swallowed it.
    """

    def __init__(self, tensors: Iterable[Tensor], refuse: Callable[[Tensor], MutationError]) -> None:
        super().__init__()
        self._stale: dict[Any, tuple[Tensor, Any]] = {}  # by what they are known by: where it comes from, what to hold
        for tensor in tensors:
            self._note(tensor, tensor)
        self._filled: set[Any] = set()
        self._refuse = refuse
        self._refused: MutationError | None = None
        self._numbers = _StaleNumbers(self)

    def __enter__(self) -> StaleReads:
        super().__enter__()
        self._numbers.__enter__()
        watches.append(self)
        _around.set((*_around.get(), self))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        watches.remove(self)
        _around.set(tuple(watch for watch in _around.get() if watch is not self))
        self._numbers.__exit__(kind, error, traceback)
        super().__exit__(kind, error, traceback)
        self._stale = {}
        if self._refused is not None and error is not self._refused:
            raise self._refused

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        is_fill = name in _FILLS and bool(args)
        source = self._source_of((args[1:] if is_fill else args, kwargs))
        if source is None:
            result = call_counted(func, args, kwargs)
            if is_fill:
                self._filled.add(_place_of(args[0]))
            return result
        looks_at_none = is_view(func)
        if not looks_at_none and not (_is_saved_by_us() and torch.Tag.dynamic_output_shape not in func.tags):
            self.refuse(source)
        result = call_counted(func, args, kwargs)
        written = written_values(func, args, kwargs)
        if any(memory_of(item) is None for item in leaves_at_op(written)):
            self.refuse(source)  # what else looks at it is unknown
        for item in leaves_at_op((result, written)):
            if isinstance(item, Tensor):
                self._note(item, source)
            elif not looks_at_none:
                self.refuse(source)
        return result

    def refuse(self, source: Tensor) -> None:
        """Raise the error for one of the tensors that were modified."""
        self._refused = self._refuse(source)
        raise self._refused

    def source_of(self, tensor: Tensor) -> Tensor | None:
        """Return the modified tensor that `tensor` comes from, if there is one."""
        found = self._stale.get(_key_of(tensor))
        return None if found is None or _place_of(tensor) in self._filled else found[0]

    def _source_of(self, value: Any) -> Tensor | None:
        sources = (self.source_of(item) for item in leaves_at_op(value) if isinstance(item, Tensor))
        return next((source for source in sources if source is not None), None)

    def _note(self, tensor: Tensor, source: Tensor) -> None:
        memory = memory_of(tensor)
        held = tensor if memory is None else tensor.untyped_storage()  # other memory must not get its address
        self._stale.setdefault(_key_of(tensor), (source, held))
        if tensor is not source:
            self._filled.discard(_place_of(tensor))


class _StaleNumbers(TorchFunctionMode):
    """Refuses stale elements that Python code gets without an op."""

    def __init__(self, reads: StaleReads) -> None:
        super().__init__()
        self._reads = reads

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func = asking(func, kwargs)
        if func in _GIVES_NUMBERS:
            source = self._reads.source_of(args[0])
            if source is not None:
                self._reads.refuse(source)
        return func(*args, **(kwargs or {}))


def is_watched() -> bool:
    """Return whether the code that runs is in a recomputation that reads a modified tensor."""
    return bool(watches) and bool(_around.get())


def comes_from_stale(tensor: Tensor) -> bool:
    """Return whether `tensor` comes from one that was modified since."""
    return any(watch.source_of(tensor) is not None for watch in _around.get())


def refuse_stale(tensor: Tensor) -> None:
    """Raise if autograd is about to save what comes from a tensor that was modified since."""
    for watch in _around.get():
        source = watch.source_of(tensor)
        if source is not None:
            watch.refuse(source)


def is_of_a_write(error: Exception) -> bool:
    """Return whether an error, autograd's or one of ours, says that a tensor was written to in place."""
    return "modified by an inplace operation" in str(error)


def _is_saved_by_us() -> bool:
    """Return whether this engine sees what autograd saves; no other library asks whether it is stale."""
    owner = getattr(innermost_pack_hook(), "__self__", None)
    return type(owner).__module__.startswith("reactivate.")


def _key_of(tensor: Tensor) -> Any:
    memory = memory_of(tensor)
    return ("tensor", id(tensor)) if memory is None else memory


def _place_of(tensor: Tensor) -> Any:
    memory = memory_of(tensor)
    if memory is None:
        return id(tensor)
    return memory, tensor.storage_offset(), tensor.size(), tensor.stride(), tensor.dtype

"""Ops that a policy of torch's selective checkpointing offloads: their results wait in a storage until the recomputation.

torch's own engine computes these ops again. So do its contexts here; but one more mode, outside of theirs, answers in the
recomputation with what was kept. What a region has modified since, and what was modified before it was copied, is computed
again, and so are views of arguments, which take no memory.
"""

from __future__ import annotations

import copy
import functools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import SAC_IGNORED_OPS, CheckpointPolicy

from reactivate._passes.stale import is_of_a_write
from reactivate._saved_calls.saved_call import Kept
from reactivate._text.warnings import warn
from reactivate._torch.autograd import counting_versions
from reactivate._torch.dynamo import DispatchMode
from reactivate._torch.ops import flatten, returns_arguments, unflatten
from reactivate._types import Storage
from reactivate.guards import ContextPair

_OFFLOADS = tuple(
    getattr(CheckpointPolicy, name)  # not in torch 2.9
    for name in ("MUST_CPU_OFFLOAD", "PREFER_CPU_OFFLOAD")
    if hasattr(CheckpointPolicy, name)
)
_SAVES = (True, CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)


class OffloadingPair(ContextPair):
    """A pair of contexts, of which torch's of selective checkpointing offload what their policy says.

    Args:
        storage: where results wait.
        make, keeps_random_numbers: as of `ContextPair`.
    """

    def __init__(self, make: Callable[[], Any], storage: Storage, *, keeps_random_numbers: bool) -> None:
        super().__init__(lambda: _offloading(make(), storage), keeps_random_numbers=keeps_random_numbers)

    def leave(self, token: Any, error: BaseException | None) -> None:
        super().leave(token, error)
        recompute = token[1][0]
        if isinstance(recompute, _Offloaded) and error is None:
            recompute.settle()


def _offloading(pair: Any, storage: Storage) -> Any:
    forward, recompute = pair
    policy = getattr(forward, "policy_fn", None)
    if not _OFFLOADS or policy is None or not isinstance(forward, TorchDispatchMode):
        return pair
    offloaded = _Offloaded(recompute, storage)
    forward = copy.copy(forward)  # the user may have it elsewhere as well; torch looks for its very class
    forward.policy_fn = functools.partial(offloaded.answer, policy)  # type: ignore[attr-defined]
    return forward, offloaded


class _Offloaded(AbstractContextManager[Any]):
    """The context of a region's recomputations, with the results that its forward pass offloads.

    A result is known by its op, and by how many calls of this op before it were not saved by torch: these are what reaches
    a mode outside of torch's in the recomputation.
    """

    def __init__(self, recompute: AbstractContextManager[Any], storage: Storage) -> None:
        self._recompute = recompute
        self._storage = storage
        self._calls: Counter[Any] = Counter()
        self._kept: dict[tuple[Any, int], tuple[list[Any], Any]] = {}
        self._entered: list[AbstractContextManager[Any]] = []

    def answer(self, policy: Callable[..., Any], context: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        """Return what the policy says of a call, and keep the call's result if that is to offload it."""
        found = policy(context, op, *args, **kwargs)
        if context.is_recompute or found in _SAVES:
            return found
        number, self._calls[op] = self._calls[op], self._calls[op] + 1
        if found in _OFFLOADS:
            if not hasattr(context, "op_output"):
                _warn_of_torch()
            elif not returns_arguments(op):
                leaves, structure = flatten(context.op_output)
                self._kept[op, number] = [self._to_keep(leaf) for leaf in leaves], structure
        return found

    def _to_keep(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        with counting_versions():
            alias = leaf.detach()
        return Kept(alias, alias._version, self._storage)

    def settle(self) -> None:
        """Hand the results over to the storage, those that the region has not modified since."""
        for call, (leaves, _) in list(self._kept.items()):
            for leaf in leaves:
                if isinstance(leaf, Kept):
                    leaf.settle(f"a result of {call[0]}")
            if any(isinstance(leaf, Kept) and leaf.handle is None for leaf in leaves):
                del self._kept[call]

    def load(self, call: tuple[Any, int]) -> Any:
        """Return the result of a call.

        Raises:
            KeyError: it is to be computed.
        """
        leaves, structure = self._kept[call]
        with counting_versions():
            try:
                found = [leaf.load().detach() if isinstance(leaf, Kept) else leaf for leaf in leaves]
            except RuntimeError as error:
                if not is_of_a_write(error):
                    raise
                raise KeyError(call) from error
        return unflatten(found, structure)

    def __enter__(self) -> Any:
        context = self._both() if self._kept else self._recompute
        entered = context.__enter__()
        self._entered.append(context)
        return entered

    def __exit__(self, *error: Any) -> Any:
        return self._entered.pop().__exit__(*error)

    @contextmanager
    def _both(self) -> Iterator[Any]:
        with _Answers(self), self._recompute as entered:
            yield entered


class _Answers(DispatchMode):
    """Answers calls with what was offloaded of them."""

    supports_higher_order_operators = True

    def __init__(self, offloaded: _Offloaded) -> None:
        super().__init__()
        self._offloaded = offloaded
        self._calls: Counter[Any] = Counter()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Say, as torch's own modes do, that compiled code may run under it."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in SAC_IGNORED_OPS:
            number, self._calls[func] = self._calls[func], self._calls[func] + 1
            try:
                return self._offloaded.load((func, number))
            except KeyError:
                pass
        return func(*args, **(kwargs or {}))


@functools.cache
def _warn_of_torch() -> None:
    warn(
        "A policy of selective checkpointing offloads results, and this torch shows policies no results: they are computed "
        "again, as torch does. Install torch 2.13 or newer."
    )

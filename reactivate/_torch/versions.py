"""Version counters: put back with the bytes of a tensor; and views, which share those of their base."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from reactivate._torch.ways import fastest


def _keeps_versions(preserve: Any, put: Any) -> bool:
    x = torch.zeros(1, device="cpu")
    with preserve((x,)):
        x.add_(1)
    is_kept = x._version == 0
    put((x,), (3,))
    return is_kept and x._version == 3


preserve_versions: Callable[[tuple[torch.Tensor, ...]], AbstractContextManager[Any]]
preserve_versions, _set_versions = fastest(
    "restoring a buffer without a new version",
    "torch.autograd._unsafe_preserve_version_counter",
    "torch._C._autograd._unsafe_set_version_counter",
    probe=_keeps_versions,
    lost="regions that write to buffers",
)


def set_versions(tensors: Sequence[torch.Tensor], versions: Sequence[int]) -> None:
    """Set version counters: memory whose bytes were put back is as if nobody had written to it."""
    _set_versions(tuple(tensors), tuple(versions))


def _counts_below_autograd(exclude: Any, views: Any) -> bool:
    x = torch.empty(1, device="cpu")
    with exclude(views, True):  # as it is in a dispatch mode
        apart = x.detach()
        with exclude(views, False):
            together = x.detach()
    x.zero_()
    return (apart._version, together._version) == (0, 1)


_exclude, _VIEWS = fastest(
    "version counters of aliases in a dispatch mode",
    "torch._C._SetExcludeDispatchKeyGuard",
    "torch._C.DispatchKey.ADInplaceOrView",
    probe=_counts_below_autograd,
    lost="offloading by policies of torch's selective checkpointing",
)


def counting_versions() -> AbstractContextManager[Any]:
    """Return a context in which aliases have the version counter of what they are made from, in a dispatch mode too."""
    return _exclude(_VIEWS, False)  # type: ignore[no-any-return]


def _is_negated(view: Any) -> bool:
    x = torch.ones(1, device="cpu")
    negated = view(x)
    is_flipped = negated.is_neg() and negated.data_ptr() == x.data_ptr() and negated.item() == -1
    return is_flipped and not view(negated).is_neg()


negated_view: Callable[[torch.Tensor], torch.Tensor | None] = fastest(
    "a view with the other negation bit",
    "torch._neg_view",
    probe=_is_negated,
    without=lambda tensor: None,
    lost="a view of a buffer whose negation bit is flipped before the backward does not see what `.data` writes to it then",
)


def view_again(view: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    """Return the view of another base, of the same shape, that `view` is of its own."""
    return view._view_func(base)  # type: ignore[attr-defined]

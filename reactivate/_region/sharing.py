"""`shared_recompute`: several backward calls use one recomputation of a region."""

from __future__ import annotations

import threading
import weakref
from types import TracebackType
from typing import Any

from reactivate._torch.autograd import is_left_for_another_backward
from reactivate.errors import UsageError

_here = threading.local()
groups: list[shared_recompute] = []  # open ones, of all threads: mostly none, and then nothing else is looked at


class shared_recompute:  # noqa: N801 - a context manager, named as one
    """Let the backward calls inside of this context share one recomputation of each region.

    For pipelines that split a backward in two (first the inputs' gradients, then the weights'): without it each call
    recomputes, with it the tensors that a later call may read are kept for it. Each goes when autograd frees the graph that
    holds it, at the latest when the context ends. Two calls that compute the same gradients of a node recompute twice.

    Raises:
        UsageError: when entered inside of itself.

    Examples:
        >>> import torch, reactivate
        >>> x = torch.ones(2, requires_grad=True)
        >>> h = reactivate.checkpoint(lambda x: (x.sin(), x.cos().exp()))(x)
        >>> with reactivate.shared_recompute():
        ...     h[0].sum().backward(retain_graph=True)
        ...     h[1].sum().backward()
    """

    def __init__(self) -> None:
        self._regions: list[weakref.ref[Any]] = []

    def __enter__(self) -> shared_recompute:
        if current_group() is not None:
            raise UsageError("shared_recompute() cannot be entered inside of itself: one context is shared already.")
        _here.group = self
        groups.append(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        _here.group = None
        groups.remove(self)
        for reference in self._regions:
            region = reference()
            if region is not None:
                region.forget()
        self._regions.clear()

    def keep(self, region: Any) -> None:
        """Let the values that were recomputed for `region` live as long as the context."""
        self._regions.append(weakref.ref(region))


def current_group() -> shared_recompute | None:
    """The context around this backward, if there is one.

    A backward runs partly on threads of autograd's own, one for each device. These do not say whose backward it is, so
    there it is the context that was opened last: if two threads share at the same time, a tensor may live longer than it
    need.
    """
    group: shared_recompute | None = getattr(_here, "group", None)
    if group is None and groups and not _is_of_python():
        return groups[-1]
    return group


def is_read_by_another() -> bool:
    """Return whether another backward inside of the context may read what the running node reads now.

    A node that passes on all of its gradients in one backward has no more to do in another one, and what it reads can go.
    Otherwise it stays until the graph lets go of it, or the context ends.
    """
    return current_group() is not None and is_left_for_another_backward()


def _is_of_python() -> bool:
    """Return whether Python has started this thread."""
    me = threading.get_ident()
    found = next((thread for thread in threading.enumerate() if thread.ident == me), None)
    return found is not None and type(found).__name__ != "_DummyThread"  # that of others', which asked for itself

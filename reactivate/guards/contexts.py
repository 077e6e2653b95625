"""A pair of contexts, one for the forward pass and one for each replay, as `torch.utils.checkpoint` takes them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from reactivate._types import Call, Guard

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


class ContextPair(Guard):
    """Runs the forward pass in one context and its replays in another.

    Args:
        make: called once a region; returns (forward context, recompute context). The second is entered anew for each
            replay.

    Example:
        >>> import contextlib, reactivate
        >>> seen = []
        >>> @contextlib.contextmanager
        ... def note(name):
        ...     seen.append(name)
        ...     yield
        >>> class Note:
        ...     def __enter__(self): seen.append("replay")
        ...     def __exit__(self, *error): pass
        >>> pair = reactivate.guards.ContextPair(lambda: (note("forward"), Note()))
        >>> f = reactivate.checkpoint(torch.sin, guards=reactivate.guards.DEFAULT.adding(pair))
        >>> f(torch.ones(2, requires_grad=True)).sum().backward()
        >>> seen
        ['forward', 'replay']
    """

    name = "contexts"
    replaces_tensors = True  # selective checkpointing gives back what it cached

    def __init__(self, make: Callable[[], Contexts]) -> None:
        self.make = make

    def before(self, call: Call) -> Any:
        forward, recompute = self.make()
        forward.__enter__()
        return forward, recompute

    def after(self, token: Any) -> Any:
        return token[1]

    def replay(self, snapshot: Any) -> AbstractContextManager[Any]:
        return snapshot  # type: ignore[no-any-return]

    def leave(self, token: Any, error: BaseException | None) -> None:
        if error is None:
            token[0].__exit__(None, None, None)
        else:
            token[0].__exit__(type(error), error, error.__traceback__)

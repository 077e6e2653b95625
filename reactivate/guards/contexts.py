"""A pair of contexts, one for the forward pass and one for each recomputation, as `torch.utils.checkpoint` takes them.

The contexts of torch's selective checkpointing give back in the recomputation what some ops computed. If one of these is
random (attention with dropout, say), it draws nothing in the recomputation, and every op after it would draw the numbers
meant for another one (Rule 10). So the state of the generator after each random op is noted in the forward pass, and set in
the recomputation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from reactivate._backends import backends
from reactivate._text.words import described
from reactivate._torch.dynamo import DispatchMode
from reactivate._types import Call, Guard
from reactivate.errors import UsageError

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
_Stream = tuple[Callable[[], Any], Callable[[Any], Any]]  # how to read and write the state of a generator


class ContextPair(Guard):
    """Runs the forward pass in one context and its recomputations in another.

    Args:
        make: called once a region; returns (forward context, recompute context). The second is entered anew for each
            recomputation.
        keeps_random_numbers: if the contexts are dispatch modes, which may give back the results of random ops, let the
            ops after them draw the numbers of the forward pass all the same.

    Raises:
        UsageError: `make` cannot be called.

    Examples:
        >>> import contextlib, reactivate
        >>> seen = []
        >>> @contextlib.contextmanager
        ... def note(name):
        ...     seen.append(name)
        ...     yield
        >>> class Note:
        ...     def __enter__(self): seen.append("recomputation")
        ...     def __exit__(self, *error): pass
        >>> pair = reactivate.guards.ContextPair(lambda: (note("forward"), Note()))
        >>> f = reactivate.checkpoint(torch.sin, guards=reactivate.guards.DEFAULT.adding(pair))
        >>> f(torch.ones(2, requires_grad=True)).sum().backward()
        >>> seen
        ['forward', 'recomputation']
    """

    name = "contexts"
    replaces_tensors = True  # selective checkpointing gives back what it cached
    is_innermost = True  # flags that the contexts set are state that was noted before

    def __init__(self, make: Callable[[], Contexts], *, keeps_random_numbers: bool = True) -> None:
        if not callable(make):
            raise UsageError(
                "ContextPair takes a function that returns (context of the forward, context of a recomputation), since each "
                f"region enters contexts of its own; got {described(make)}. Write ContextPair(lambda: (..., ...))."
            )
        self.make = make
        self._keeps_random_numbers = keeps_random_numbers

    def before(self, call: Call) -> Any:
        forward, recompute = self.make()
        states: list[Any] = []
        stack = ExitStack()
        if self._keeps_random_numbers and isinstance(forward, TorchDispatchMode):
            # Outside of the user's, which is then the mode that the function finds itself in.
            stack.enter_context(_Streams(lambda read, write: states.append(read())))
        stack.enter_context(forward)
        return stack, (recompute, states)

    def after(self, token: Any) -> Any:
        return token[1]

    def recompute(self, snapshot: Any) -> AbstractContextManager[Any]:
        recompute, states = snapshot
        return _in_step(recompute, states) if states else recompute

    def leave(self, token: Any, error: BaseException | None) -> None:
        token[0].__exit__(*(None, None, None) if error is None else (type(error), error, error.__traceback__))


@contextmanager
def _in_step(recompute: AbstractContextManager[Any], states: list[Any]) -> Iterator[None]:
    """`recompute`, with the generators after each random op as they were."""
    remaining = iter(states)
    with recompute, _Streams(lambda read, write: _write_next(remaining, write)):
        yield


def _write_next(remaining: Iterator[Any], write: Callable[[Any], Any]) -> None:
    for state in remaining:
        write(state)
        return


class _Streams(DispatchMode):
    """Calls `after(read, write)` after each random op, with functions for the state of its generator."""

    def __init__(self, after: Callable[[Callable[[], Any], Callable[[Any], Any]], None]) -> None:
        super().__init__()
        self._after = after

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in func.tags:
            self._after(*_stream_of(result, kwargs or {}))
        return result


def _stream_of(result: Any, kwargs: dict[str, Any]) -> _Stream:
    """The generator that made `result`."""
    tensors = result if isinstance(result, (tuple, list)) else [result]
    kinds = {tensor.device.type for tensor in tensors if isinstance(tensor, Tensor)}
    backend = next((item for item in backends() if item.device_type in kinds), None)
    generator = kwargs.get("generator") or torch.default_generator
    if backend is None or generator is not torch.default_generator:
        return generator.get_state, generator.set_state
    return backend.read_rng, backend.write_rng

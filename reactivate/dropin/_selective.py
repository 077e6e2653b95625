"""Random numbers under contexts that give results back instead of computing them again.

torch's selective checkpointing keeps what some ops computed. If one of them is random (attention with dropout, say), it
draws nothing in the replay, and every op after it would draw the numbers meant for another one (Rule 10). So the state
of the generator after each random op is noted in the forward pass, and set in the replay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from reactivate._backends import accelerator
from reactivate._types import Call
from reactivate.guards import ContextPair

_States = list[Any]
_Stream = tuple[Callable[[], Any], Callable[[Any], Any]]  # how to read and write the state of a generator


class SelectivePair(ContextPair):
    """A `ContextPair`. If its contexts are dispatch modes, the random numbers after what they give back are right."""

    def before(self, call: Call) -> Any:
        forward, recompute = self.make()
        states: _States = []
        stack = ExitStack()
        stack.enter_context(forward)
        if isinstance(forward, TorchDispatchMode):
            stack.enter_context(_Streams(lambda read, write: states.append(read())))
        return stack, (recompute, states)

    @contextmanager
    def replay(self, snapshot: Any) -> Iterator[None]:
        recompute, states = snapshot
        remaining = iter(states)
        with ExitStack() as stack:
            stack.enter_context(recompute)
            if states:
                stack.enter_context(_Streams(lambda read, write: _write_next(remaining, write)))
            yield


def _write_next(remaining: Iterator[Any], write: Callable[[Any], Any]) -> None:
    for state in remaining:
        write(state)
        return


class _Streams(TorchDispatchMode):
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
    is_on_cpu = all(tensor.device.type == "cpu" for tensor in tensors if isinstance(tensor, Tensor))
    backend = None if is_on_cpu else accelerator()
    generator = kwargs.get("generator") or torch.default_generator
    if backend is None or generator is not torch.default_generator:
        return generator.get_state, generator.set_state
    return backend.read_rng, backend.write_rng

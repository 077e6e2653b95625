"""TorchScript inside a region.

TorchScript compiles a function after it has watched some calls of it (one, unless told otherwise). The compiled one saves
other tensors for its backward than the watched one, in another order and of the same shapes. A recomputation may not be
compiled where its forward pass was not: its tensors would be taken for others. So the calls that TorchScript watches are not
checkpointed; and where a scripted function was not found by looking at the region's function, its forward pass, once it
has run, is refused.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

from reactivate._torch.dynamo import count_of_profiled_runs, is_compiled_script, is_profiling_graph
from reactivate.errors import UnsupportedError

# Calls of regions that can reach it, while TorchScript still watched. (It may not be called in all of them.)
_watched_calls: WeakKeyDictionary[Any, int] = WeakKeyDictionary()


def is_being_watched(scripts: Sequence[Any]) -> bool:
    """Return whether TorchScript may run one of these without having compiled it."""
    watched = [script for script in scripts if _watched_calls.get(script, 0) < count_of_profiled_runs()]
    for script in list(watched):
        if is_compiled_script(script):
            _watched_calls[script] = count_of_profiled_runs()
            watched.remove(script)
        elif script not in _watched_calls:
            _warn(script)
    return bool(watched)


def _warn(script: Any) -> None:
    _watched_calls[script] = 0
    name = getattr(script, "original_name", None) or getattr(script, "name", type(script).__name__)
    warnings.warn(
        f"The scripted `{name}` is not compiled yet, and until it is, it saves other tensors than afterwards. So the region "
        f"that was called keeps its activations this once. To checkpoint from the first call on, call `{name}` twice on a "
        "small input beforehand.",
        stacklevel=6,
    )


def call_watched(fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any], scripts: Sequence[Any]) -> Any:
    """`fn(*args, **kwargs)`, which TorchScript watches."""
    try:
        return fn(*args, **kwargs)
    finally:
        for script in scripts:
            _watched_calls[script] = _watched_calls.get(script, 0) + 1


def refuse_watched(graph: Any, region: str) -> None:
    """`graph` is what TorchScript ran last in the forward pass of a region.

    Raises:
        UnsupportedError: it will run another one in the recomputation.
    """
    if graph is not None and is_profiling_graph(graph):
        raise UnsupportedError(
            f"A scripted function ran for the first time inside of the region `{region}`. TorchScript compiles it after "
            "that, and the recomputation would save other tensors than the forward pass did. Call the scripted function "
            "twice on a small input before the first training step."
        )

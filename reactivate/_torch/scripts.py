"""TorchScript."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from reactivate._torch.ways import fastest

# The graph that TorchScript's interpreter ran last on this thread, None if it never did: 0.05 us.
last_script_graph: Callable[[], Any] = fastest(
    "the scripted function that ran last",
    "torch._C._last_executed_optimized_graph",
    probe=lambda ask: ask() is ask(),
    without=lambda: None,
    lost="the first call of a scripted function raises if reactivate cannot find that function in the code",
)
# How many calls TorchScript watches before it compiles.
count_of_profiled_runs: Callable[[], int] = fastest(
    "the number of calls that TorchScript profiles",
    "torch._C._jit_get_num_profiled_runs",
    probe=lambda ask: ask() >= 0,
    lost="regions with scripted functions",
)


def is_profiling_graph(graph: Any) -> bool:
    """Return whether TorchScript ran `graph` to see what to compile, and will run another one next time."""
    return any(node.kind() == "prim::profile" for node in graph.nodes())


def is_compiled_script(script: Any) -> bool:
    """Return whether a scripted function or module has been called often enough to be compiled."""
    try:
        script.get_debug_state()
    except RuntimeError:
        return False
    return True

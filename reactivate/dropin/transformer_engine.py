"""`transformer_engine.pytorch.checkpoint`, with its signature, on this engine.

Its reentrant and its non-reentrant variant are the same here. Layers need not be told that they run in a recomputation: their
histories and scales are rewound, for microbatches in any order. It was written to the published signatures, and has not met
the real package, which cannot be imported without CUDA.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import noop_context_fn

from reactivate import storage
from reactivate._engine.run import module_called_by, run, run_module
from reactivate._run import run_region
from reactivate._text.keywords import refuse_unknown
from reactivate._types import Storage
from reactivate.dropin._asked import Asked
from reactivate.dropin._autocast_state import AutocastState
from reactivate.dropin._references import Swap
from reactivate.dropin._replacement import Replacement, second_instance
from reactivate.errors import UnsupportedError, UsageError
from reactivate.guards import DEFAULT, Guards, TrackerGuard

__all__ = ["checkpoint", "install"]

_LIBRARY = "transformer_engine.pytorch"
_PLACE = "transformer_engine.pytorch.distributed"

guards: Guards = DEFAULT
"""The guards of every region. `install` has an instance of this module of its own, with its own guards."""


def checkpoint(
    function: Callable[..., Any],
    *args: Any,
    distribute_saved_activations: bool = False,
    tp_group: Any = None,
    get_rng_state_tracker: Callable[[], Any] | None = None,
    use_reentrant: bool = True,
    context_fn: Callable[[], Any] = noop_context_fn,
    determinism_check: str = "default",
    debug: bool = False,
    **kwargs: Any,
) -> Any:
    """`transformer_engine.pytorch.checkpoint` on this engine: the same arguments and meanings.

    Args:
        function: what to checkpoint; called with `args` and what is left of `kwargs`.
        distribute_saved_activations: keep 1/n of each input on each of the n ranks of `tp_group`.
        tp_group: the tensor-parallel process group; by default all ranks. Only `distribute_saved_activations` reads it.
        get_rng_state_tracker: returns the tracker of named RNG states, which recomputations see as the forward did.
        use_reentrant: without meaning: both variants are the same here.
        context_fn: () -> (context for the forward, context for a recomputation), with both variants. TransformerEngine's own
            `get_activation_recompute_contexts` is left out, since the state that it lets layers keep is rewound.
        determinism_check, debug: as in `torch.utils.checkpoint`, with both variants.
        kwargs: for `function`.

    Raises:
        UsageError: an option has a value that it cannot have, or does not go with another.
        ReactivateError: see `reactivate.checkpoint`.

    Example:
        >>> import torch, reactivate
        >>> x = torch.ones(2, requires_grad=True)
        >>> reactivate.dropin.transformer_engine.checkpoint(torch.sin, x, use_reentrant=False).sum().backward()
    """
    used = _guards(guards, get_rng_state_tracker)
    options = Asked(context_fn=context_fn, determinism_check=determinism_check, debug=debug).options(used, None, None)
    if distribute_saved_activations:
        options = options.of(None, None, None, _sharded(tp_group))
    module = module_called_by(function)
    if module is None:
        return run_region(run, options, function, *args, **kwargs)
    return run_region(run_module, options, module, *args, **kwargs)


@functools.lru_cache(maxsize=16)
def _guards(guards: Guards, get_rng_state_tracker: Callable[[], Any] | None) -> Guards:
    guards = guards.adding(AutocastState())
    return guards if get_rng_state_tracker is None else guards.adding(TrackerGuard(get_rng_state_tracker))


def _sharded(tp_group: Any) -> Storage:
    kind = getattr(storage, "Sharded", None)
    if kind is None:
        raise UnsupportedError("distribute_saved_activations=True needs reactivate.storage.Sharded: leave it out.")
    return kind(torch.distributed.group.WORLD if tp_group is None else tp_group)  # type: ignore[no-any-return]


@refuse_unknown
def install(*, guards: Guards = DEFAULT) -> Replacement:
    """Run everything that calls `transformer_engine.pytorch.checkpoint` on this engine, without an edit.

    Args:
        guards: for every region; add to them what the program needs.

    Returns:
        A handle with `remove()`; also a context manager.

    Raises:
        UsageError: TransformerEngine cannot be imported, or the drop-in is installed already.
    """
    try:
        theirs = importlib.import_module(_PLACE)
    except ImportError as error:
        raise UsageError(
            f"{_LIBRARY} cannot be imported, so that there is nothing to replace: {error}. Call "
            "reactivate.dropin.transformer_engine.checkpoint itself."
        ) from error
    if getattr(theirs.checkpoint, "_of_reactivate", False):
        raise UsageError("The drop-in is installed already. Call `remove()` on what the first `install()` returned.")
    instance = second_instance(sys.modules[__name__])
    instance.guards = guards  # type: ignore[attr-defined]
    new = instance.checkpoint
    new.__module__, new._of_reactivate = _PLACE, True
    return Replacement(_LIBRARY, [Swap(theirs.checkpoint, new)])

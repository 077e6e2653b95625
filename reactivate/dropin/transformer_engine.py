"""`transformer_engine.pytorch.checkpoint`, with its signature, on this engine.

Its reentrant and its non-reentrant variant are the same here. Layers need not be told that they run in a recomputation: their
histories and scales are rewound, for microbatches in any order. It was written to the published signatures, and has not met
the real package, which cannot be imported without CUDA.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch.utils.checkpoint import noop_context_fn

from reactivate._text.keywords import refuse_unknown
from reactivate._types import Storage
from reactivate.dropin._asked import Asked
from reactivate.dropin._autocast_state import AutocastState
from reactivate.dropin._calls import Chosen, call_with, guard_of, is_first_of
from reactivate.dropin._installation import Installation, Tally, again, library
from reactivate.guards import DEFAULT, Guards
from reactivate.storage import Host, Sharded

__all__ = ["checkpoint", "install"]

_PLACE = "transformer_engine.pytorch.distributed"
_AUTOCAST = AutocastState()

guards: Guards = DEFAULT
"""The guards of every region. `install` has an instance of this module of its own, with its own guards."""

storage: Storage = Host()
"""The storage for what policies of torch's selective checkpointing offload."""

tally = Tally()


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
        distribute_saved_activations: keep one part of `args[0]` on each rank of `tp_group`; see `storage.Sharded`.
        tp_group: the tensor-parallel process group; by default all ranks. Only `distribute_saved_activations` reads it.
        get_rng_state_tracker: returns the tracker of named RNG states, which recomputations see as the forward did.
        use_reentrant: without meaning: both variants are the same here.
        context_fn: () -> (context for the forward, context for a recomputation), with both variants. TransformerEngine's own
            `get_activation_recompute_contexts` is left out, since the state that it lets layers keep is rewound.
        determinism_check: as in `torch.utils.checkpoint`, with both variants.
        debug: as in `torch.utils.checkpoint`, with both variants.
        kwargs: for `function`.

    Raises:
        UsageError: an option has a value that it cannot have, or does not go with another.
        ReactivateError: see `reactivate.checkpoint`.

    Examples:
        >>> import torch, reactivate
        >>> x = torch.ones(2, requires_grad=True)
        >>> reactivate.dropin.transformer_engine.checkpoint(torch.sin, x, use_reentrant=False).sum().backward()
    """
    tally.add()
    used = guards.adding(_AUTOCAST)
    if get_rng_state_tracker is not None:
        used = used.adding(guard_of(get_rng_state_tracker))
    asked = Asked(context_fn=context_fn, determinism_check=determinism_check, debug=debug)
    options = asked.options(used, storage, None, None)
    if distribute_saved_activations:
        is_first = is_first_of(args, "checkpoint(function, *args, distribute_saved_activations=True)")
        options = options.of(None, None, None, Chosen(Sharded(tp_group, least_bytes=0), is_first))
    return call_with(options, function, args, kwargs)


@refuse_unknown
def install(*, guards: Guards | None = None) -> Installation:
    """Run everything that calls `transformer_engine.pytorch.checkpoint` on this engine, without an edit.

    Args:
        guards: for every region, `guards.DEFAULT` if None; add to them what the program needs.

    Returns:
        A handle with `remove()`; also a context manager. If it is installed already, the same handle.

    Raises:
        UsageError: TransformerEngine cannot be imported, or the drop-in is installed already with other guards.
    """
    upstream = library(_PLACE, "reactivate.dropin.transformer_engine.install")
    settings = {} if guards is None else {"guards": guards}
    return again(_PLACE, **settings) or Installation(
        upstream, sys.modules[__name__], {"checkpoint": "checkpoint"}, **settings
    )

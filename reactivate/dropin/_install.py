"""`install`: torch's checkpoint functions replaced wherever something refers to them."""

from __future__ import annotations

from typing import Any

import torch.utils.checkpoint as upstream

from reactivate._options import checked
from reactivate._text.keywords import refuse_unknown
from reactivate._types import Storage
from reactivate.dropin import torch as dropin
from reactivate.dropin._installation import Installation, again, find
from reactivate.guards import Guards
from reactivate.policies._base import check_storage

# {name in torch.utils.checkpoint: name in reactivate.dropin.torch}
_NAMES = {
    "checkpoint": "checkpoint",
    "checkpoint_sequential": "checkpoint_sequential",
    "set_checkpoint_early_stop": "set_checkpoint_early_stop",
    "set_checkpoint_debug_enabled": "set_checkpoint_debug_enabled",
    "GraphExecGroup": "GraphExecGroup",
    "CheckpointFunction": "CheckpointFunction",
    "_checkpoint_impl": "checkpoint_impl",
    "_checkpoint_without_reentrant_generator": "checkpoint_without_reentrant_generator",
    "_checkpoint_without_reentrant_generator_impl": "checkpoint_generator_impl",
}


@refuse_unknown
def install(*, guards: Guards | None = None, storage: Storage | None = None) -> Installation:
    """Run everything that calls `torch.utils.checkpoint` on this engine, without an edit.

    References that were imported earlier are found and replaced: in modules, on objects and classes, in containers,
    closures, `functools.partial`s and default arguments; among them `torch.distributed`'s checkpoint wrapper and
    composable `checkpoint`. Only a local variable of a function that is running keeps what it has. Regions that exist
    keep their engine. It takes a few looks through the heap, some tenths of a second in a large program.

    What a compiler traces (`torch.compile`, `torch.export`) is torch's own operator, as it is without the drop-in.

    Args:
        guards: for every region, `guards.DEFAULT` if None; add to them what the program's libraries need, an RNG tracker say.
        storage: where the results wait that policies of torch's selective checkpointing offload; `storage.Host()` if None.

    Returns:
        A handle with `remove()` and `regions`; also a context manager. If it is installed already, the same handle.

    Raises:
        UsageError: it is installed already with other guards or another storage; a guard is none, or could not restore
            anything; or `gc.freeze()` has hidden the references.

    Examples:
        >>> import torch, reactivate
        >>> with reactivate.dropin.install() as installation:
        ...     x = torch.ones(2, requires_grad=True)
        ...     torch.utils.checkpoint.checkpoint(torch.sin, x, use_reentrant=False).sum().backward()
        >>> installation.regions
        1
    """
    settings: dict[str, Any] = {}
    if guards is not None:
        checked(guards)
        settings["guards"] = guards
    if storage is not None:
        check_storage(storage, "install(storage=...)")
        settings["storage"] = storage
    return again(upstream.__name__, **settings) or Installation(upstream, dropin, _NAMES, **settings)


def uninstall() -> None:
    """Put torch's checkpoint functions back, as `remove()` of what `install` returned does. Without it, do nothing.

    Examples:
        >>> import reactivate
        >>> installation = reactivate.dropin.install()
        >>> reactivate.dropin.uninstall()
        >>> reactivate.dropin.is_installed()
        False
    """
    found = find(upstream.__name__)
    if found is not None:
        found.remove()


def is_installed() -> bool:
    """Return whether `install` has put this engine in the place of torch's checkpoint functions."""
    return find(upstream.__name__) is not None

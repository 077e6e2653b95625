"""`install`: torch's checkpoint functions replaced wherever something refers to them."""

from __future__ import annotations

import importlib.util
from types import ModuleType, TracebackType

import torch.utils.checkpoint as upstream

from reactivate._options import checked
from reactivate._text.keywords import refuse_unknown
from reactivate._types import Storage
from reactivate.dropin import torch as dropin
from reactivate.dropin._references import Swap, backwards, replace_everywhere
from reactivate.errors import UsageError
from reactivate.guards import DEFAULT, Guards
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

_active: list[Installation] = []


class Installation:
    """The handle of `install`: a context manager, whose end takes it back, as `remove()` does."""

    def __init__(self, guards: Guards, offload: Storage) -> None:
        instance = _second_instance(dropin)
        instance.guards = guards  # type: ignore[attr-defined]
        instance.offload = offload  # type: ignore[attr-defined]
        names = [name for name in _NAMES if hasattr(upstream, name)]  # not all of them are in every torch
        self._names = names
        swaps = [Swap(getattr(upstream, name), getattr(instance, _NAMES[name])) for name in names]
        for name, swap in zip(names, swaps):
            swap.new.__module__, swap.new.__name__, swap.new.__qualname__ = upstream.__name__, name, name  # for pickle
        self._swaps = replace_everywhere(swaps)
        if any(getattr(upstream, name) is swap.old for name, swap in zip(names, swaps)):
            replace_everywhere(backwards(self._swaps))
            raise UsageError(
                "The references to torch.utils.checkpoint could not be found: `gc.freeze()` hides them. Install the "
                "drop-in before that, or call `gc.unfreeze()` first."
            )
        # Only now: what is in a dict would have been replaced.
        instance.replaced = {name: swap.old for name, swap in zip(names, swaps)}  # type: ignore[attr-defined]
        _active.append(self)

    def __repr__(self) -> str:
        state = "installed" if self in _active else "taken back"
        return f"<reactivate in the place of torch.utils.checkpoint, {state}: {', '.join(self._names)}>"

    def remove(self) -> None:
        """Put torch's functions back, also where they were imported from torch in the meantime.

        Raises:
            UsageError: this was done before.
        """
        if self not in _active:
            raise UsageError("This installation was taken back already.")
        _active.remove(self)
        replace_everywhere(backwards(self._swaps))

    def __enter__(self) -> Installation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.remove()


@refuse_unknown
def install(*, guards: Guards = DEFAULT, offload: Storage = dropin.offload) -> Installation:
    """Run everything that calls `torch.utils.checkpoint` on this engine, without an edit.

    References that were imported earlier are found and replaced: in modules, on objects and classes, in containers,
    closures, `functools.partial`s and default arguments; among them `torch.distributed`'s checkpoint wrapper and
    composable `checkpoint`. Only a local variable of a function that is running keeps what it has. Regions that exist
    keep their engine. It takes a few looks through the heap, some tenths of a second in a large program.

    What a compiler traces (`torch.compile`, `torch.export`) is torch's own operator, as it is without the drop-in.

    Args:
        guards: for every region; add to them what the program's libraries need, an RNG tracker say.
        offload: where the results wait that policies of torch's selective checkpointing offload.

    Returns:
        A handle with `remove()`; also a context manager.

    Raises:
        UsageError: it is installed already; a guard is none, or could not restore anything; or `gc.freeze()` has hidden the
            references.

    Example:
        >>> import torch, reactivate
        >>> with reactivate.dropin.install():
        ...     x = torch.ones(2, requires_grad=True)
        ...     torch.utils.checkpoint.checkpoint(torch.sin, x, use_reentrant=False).sum().backward()
    """
    if _active:
        raise UsageError("The drop-in is installed already. Call `remove()` on what the first `install()` returned.")
    checked(guards)
    check_storage(offload, "install(offload=...)")
    return Installation(guards, offload)


def _second_instance(module: ModuleType) -> ModuleType:
    """The module once more: functions of its own, so that a reference to one of them stems from the installation."""
    spec = module.__spec__
    assert spec is not None
    assert spec.loader is not None
    instance = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(instance)
    return instance

"""`install`: torch's checkpoint functions replaced wherever something refers to them."""

from __future__ import annotations

import functools
import gc
import importlib.util
from types import CellType, FunctionType, ModuleType, TracebackType
from typing import Any

import torch.utils.checkpoint as upstream

from reactivate.dropin import torch as dropin
from reactivate.errors import UsageError
from reactivate.guards import DEFAULT, Guards

# {name in torch.utils.checkpoint: name in reactivate.dropin.torch}
_NAMES = {
    "checkpoint": "checkpoint",
    "checkpoint_sequential": "checkpoint_sequential",
    "set_checkpoint_early_stop": "set_checkpoint_early_stop",
    "set_checkpoint_debug_enabled": "set_checkpoint_debug_enabled",
    "GraphExecGroup": "GraphExecGroup",
    "CheckpointFunction": "CheckpointFunction",
    "_checkpoint_without_reentrant_generator": "checkpoint_without_reentrant_generator",
}

_active: list[Installation] = []


class Installation:
    """What `install` did: a context manager, whose end takes it back, as `uninstall()` does."""

    def __init__(self, guards: Guards) -> None:
        instance = _second_instance(dropin)
        instance.guards = guards  # type: ignore[attr-defined]
        self._pairs: list[tuple[Any, Any]] = []
        for theirs, ours in _NAMES.items():
            if hasattr(upstream, theirs):  # not all of them are in every torch
                new = getattr(instance, ours)
                new.__module__, new.__name__, new.__qualname__ = upstream.__name__, theirs, theirs  # for pickle
                self._pairs.append((getattr(upstream, theirs), new))
        for old, new in self._pairs:
            _rebind(old, new)
        _active.append(self)

    def uninstall(self) -> None:
        """Put torch's functions back, also where they were imported from torch in the meantime.

        Raises:
            UsageError: this was done before.
        """
        if self not in _active:
            raise UsageError("This installation was taken back already.")
        _active.remove(self)
        for old, new in self._pairs:
            _rebind(new, old)

    def __enter__(self) -> Installation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.uninstall()


def install(*, guards: Guards = DEFAULT) -> Installation:
    """Run everything that calls `torch.utils.checkpoint` on this engine, without an edit.

    References that were imported earlier are found and replaced: in modules, on objects and classes, in closures,
    `functools.partial`s and default arguments; among them `torch.distributed`'s checkpoint wrapper and composable
    `checkpoint`. Regions that exist keep their engine.

    Args:
        guards: for every region; add to them what the program's libraries need, an RNG tracker say.

    Returns:
        A handle with `uninstall()`; also a context manager.

    Raises:
        UsageError: it is installed already.

    Example:
        >>> import torch, reactivate
        >>> with reactivate.dropin.install():
        ...     x = torch.ones(2, requires_grad=True)
        ...     torch.utils.checkpoint.checkpoint(torch.sin, x, use_reentrant=False).sum().backward()
    """
    if _active:
        raise UsageError("The drop-in is installed already. Call `uninstall()` on what the first `install()` returned.")
    return Installation(guards)


def _second_instance(module: ModuleType) -> ModuleType:
    """The module once more: functions of its own, so that a reference to one of them stems from the installation."""
    spec = module.__spec__
    assert spec is not None and spec.loader is not None
    instance = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(instance)
    return instance


def _rebind(old: Any, new: Any) -> None:
    """Let every reference to `old` be one to `new`."""
    # No comprehension here: its closure over `old` would be one of the references.
    for holder in gc.get_referrers(old):
        if isinstance(holder, dict):
            _rebind_items(holder, old, new)
        elif isinstance(holder, list):
            for index, item in enumerate(holder):
                if item is old:
                    holder[index] = new
        elif isinstance(holder, CellType):
            holder.cell_contents = new
        elif isinstance(holder, functools.partial):
            if holder.func is old:
                holder.__setstate__((new, holder.args, holder.keywords, holder.__dict__))  # type: ignore[attr-defined]
        elif isinstance(holder, staticmethod):
            _rebind(holder, staticmethod(new))
        elif isinstance(holder, tuple):
            _rebind_tuple(holder, _replaced(holder, old, new))


def _replaced(items: tuple[Any, ...], old: Any, new: Any) -> tuple[Any, ...]:
    return tuple(new if item is old else item for item in items)


def _rebind_items(holder: dict[Any, Any], old: Any, new: Any) -> None:
    keys = [key for key, value in holder.items() if value is old]
    owners = [owner for owner in gc.get_referrers(holder) if isinstance(owner, type)]
    for key in keys:
        classes = [owner for owner in owners if isinstance(key, str) and vars(owner).get(key) is old]
        if classes:
            setattr(classes[0], key, new)  # a class has caches, so it has to be told
        else:
            holder[key] = new


def _rebind_tuple(holder: tuple[Any, ...], replaced: tuple[Any, ...]) -> None:
    for owner in gc.get_referrers(holder):
        if isinstance(owner, FunctionType) and owner.__defaults__ is holder:
            owner.__defaults__ = replaced
        elif isinstance(owner, functools.partial) and owner.args is holder:
            owner.__setstate__((owner.func, replaced, owner.keywords, owner.__dict__))

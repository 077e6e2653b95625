"""Installations: functions of a drop-in in the place of a library's, wherever something refers to these."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Mapping
from threading import Lock
from types import ModuleType
from typing import Any

from torch import is_grad_enabled
from torch.autograd import Function

from reactivate._snapshot.shadows import forget_shadows
from reactivate._text.words import counted
from reactivate.dropin._references import Swap, backwards, replace_everywhere
from reactivate.errors import UsageError

_active: list[Installation] = []


class Tally:
    """A count of the regions that run through one instance of a drop-in.

    Attributes:
        regions: how many there were: calls with gradients, outside of compilers.
    """

    def __init__(self) -> None:
        self.regions = 0
        self._lock = Lock()

    def add(self) -> None:
        """Count a call, if it may keep something for a backward."""
        if is_grad_enabled():
            with self._lock:
                self.regions += 1


class Installation:
    """The handle of `install`: a context manager, whose end takes it back, as `remove()` does.

    A second `install()` returns the same handle. The end of a `with` around that leaves it installed.

    Args:
        upstream: the library's module.
        dropin: the module of the drop-in.
        names: {name in the library's module: name in the drop-in}; those that the library does not have are left out.
        settings: attributes of the drop-in, for this installation.

    Raises:
        UsageError: `gc.freeze()` has hidden the references.
    """

    def __init__(self, upstream: ModuleType, dropin: ModuleType, names: Mapping[str, str], **settings: Any) -> None:
        self._upstream = upstream.__name__
        self._lent = 0  # to calls of `install` whose `with` has not begun
        self._ends_here: list[bool] = []  # for each `with` that it is in
        instance: Any = _second_instance(dropin)
        self._instance = instance
        for name, value in settings.items():
            setattr(instance, name, value)
        self._names = [name for name in names if hasattr(upstream, name)]
        swaps = [_swap(getattr(upstream, name), getattr(instance, names[name])) for name in self._names]
        for name, swap in zip(self._names, swaps):
            swap.new.__module__, swap.new.__name__, swap.new.__qualname__ = upstream.__name__, name, name  # for pickle
        self._swaps = replace_everywhere(swaps)
        if any(getattr(upstream, name) is swap.old for name, swap in zip(self._names, swaps)):
            replace_everywhere(backwards(self._swaps))
            raise UsageError(
                f"The references to {self._upstream} could not be found: `gc.freeze()` hides them. Install the drop-in "
                "before that, or call `gc.unfreeze()` first."
            )
        # Only now: what is in a dict would have been replaced.
        instance.replaced = {name: swap.old for name, swap in zip(self._names, swaps)}
        _active.append(self)

    def __repr__(self) -> str:
        state = "installed" if self in _active else "taken back"
        names = ", ".join(self._names)
        return f"<reactivate in the place of {self._upstream}, {state}, {counted(self.regions, 'region')} ran: {names}>"

    @property
    def regions(self) -> int:
        """The number of regions that ran through it: calls with gradients, outside of compilers."""
        return self._instance.tally.regions  # type: ignore[no-any-return]

    def remove(self) -> None:
        """Put the library's functions back, also where they were imported from it, and let go of copies of buffers.

        Raises:
            UsageError: this was done before.
        """
        if self not in _active:
            raise UsageError("This installation was taken back already.")
        _active.remove(self)
        self._lent = 0
        replace_everywhere(backwards(self._swaps))
        forget_shadows()

    def __enter__(self) -> Installation:
        self._ends_here.append(self._lent == 0)
        self._lent = max(self._lent - 1, 0)
        return self

    def __exit__(self, *error: object) -> None:
        if self._ends_here.pop() and self in _active:
            self.remove()

    def _lend(self, settings: Mapping[str, Any]) -> Installation:
        for name, value in settings.items():
            present = getattr(self._instance, name)
            if value != present:
                raise UsageError(
                    f"install({name}={value!r:.100}): the drop-in for {self._upstream} is installed already, with "
                    f"{name}={present!r:.100}. Leave {name} out, or call remove() on what install() returned."
                )
        self._lent += 1
        return self


_APPLY: Any = inspect.getattr_static(Function, "apply")


def _swap(old: Any, new: Any) -> Swap:
    """Return what takes the place of `old`: of an `autograd.Function` a subclass, which alone is applied as `new` is.

    A subclass of a user's comes after it. So it has its own forward and backward, and the library's where it has none.
    """
    if not (isinstance(old, type) and issubclass(old, Function)):
        return Swap(old, new)

    class Applied(old):  # type: ignore[misc]
        @classmethod
        def apply(cls, *args: Any, **kwargs: Any) -> Any:
            if cls is Applied:  # after `remove`, which finds the name here too, none is
                return new.apply(*args, **kwargs)
            # Not `super()`: another installation would put its own class into the cell that this reads.
            return _APPLY.__get__(None, cls)(*args, **kwargs)

    Applied.__doc__ = new.__doc__
    return Swap(old, Applied)


def again(upstream: str, **settings: Any) -> Installation | None:
    """Return the installation in the place of a module, None if there is none.

    Args:
        upstream: the name of the module.
        settings: attributes of the drop-in that were asked for.

    Raises:
        UsageError: it has other ones.
    """
    found = find(upstream)
    return None if found is None else found._lend(settings)


def find(upstream: str) -> Installation | None:
    """Return what is in the place of a module, None if that is the module itself."""
    return next((one for one in _active if one._upstream == upstream), None)


def library(name: str, asked_by: str) -> ModuleType:
    """Import the module that a drop-in takes the place of.

    Raises:
        UsageError: it is not installed, or cannot be imported here.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UsageError(
            f"{asked_by} takes the place of {name}, which cannot be imported ({error}). Without it, call the functions of "
            "the drop-in themselves."
        ) from error


def _second_instance(module: ModuleType) -> ModuleType:
    """The module once more: functions of its own, so that a reference to one of them stems from the installation."""
    spec = module.__spec__
    assert spec is not None
    assert spec.loader is not None
    instance = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(instance)
    return instance

"""A checkpointed module: the same module under a second identity, whose call is a region.

The view and the original share one `__dict__`, and with it parameters, buffers, children, hooks and `training`. The view's
class is derived from the original's, so that `isinstance`, methods and properties are those of the original; calls of the
original stay plain.
"""

from __future__ import annotations

import functools
import sys
import types
from typing import Any, TypeVar, cast

from torch.compiler import is_compiling
from torch.nn import Module

M = TypeVar("M", bound=Module)

_CLASS: Any = vars(object)["__class__"]


class ModuleView:
    """The part of a view's class that is not the original's.

    The view has no state of its own but the original, and the checkpointed function that its call runs.
    """

    __slots__ = ("_reactivate_original", "_reactivate_region")
    _reactivate_original: Any
    _reactivate_region: Any
    _reactivate_kind: type[Module]  # the class of the original that the view's class is derived from

    def __init_subclass__(cls, **options: Any) -> None:
        """Do nothing: the original's class may keep a list of those that are derived from it."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_compiling():  # dynamo reads no slots before torch 2.13
            return getattr(_regions, f"of_{id(self)}")(*args, **kwargs)
        kind = self._reactivate_original.__class__
        if self._reactivate_kind is not kind:  # a lazy module takes another class in its first call
            _CLASS.__set__(self, _view_class(kind))
        return self._reactivate_region(*args, **kwargs)

    def __del__(self) -> None:
        regions = getattr(_regions, "__dict__", None)  # module-level names are None when Python ends
        if regions is not None:
            regions.pop(f"of_{id(self)}", None)

    @property
    def __wrapped__(self) -> Module:
        """The original."""
        return self._reactivate_original  # type: ignore[no-any-return]

    @property
    def __class__(self) -> Any:
        """The class of the original; to set it, as `parametrize` and `fully_shard` do, is to set it for both."""
        return self._reactivate_original.__class__

    @__class__.setter
    def __class__(self, kind: Any) -> None:
        kind = getattr(kind, "_reactivate_kind", kind)
        self._reactivate_original.__class__ = kind
        _CLASS.__set__(self, _view_class(kind))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._reactivate_region.__reduce__()

    def __copy__(self) -> Any:
        return self._reactivate_region.__copy__()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self._reactivate_region.__deepcopy__(memo)


def view_of(module: M, region: functools.partial[Any]) -> M | None:
    """Return a view of `module` whose call runs `region`; None if the class of `module` allows no views.

    Args:
        region: the call of `module` as a region, which can be copied and pickled.
    """
    try:
        kind: Any = _view_class(module.__class__)
    except TypeError:  # its objects have slots
        return None
    view: Any = object.__new__(kind)
    for name, value in (
        ("_reactivate_original", module),
        ("_reactivate_region", region),
        ("__dict__", module.__dict__),
    ):
        object.__setattr__(view, name, value)
    setattr(_regions, f"of_{id(view)}", functools.partial(region.func, *region.args))
    return cast(M, view)


class _Regions:
    """The regions of all views that are alive, by attributes with their ids in the name."""


_regions = _Regions()


def original_of(module: M) -> M:
    """Return the module that `module` is a view of; `module` itself if it is no view."""
    while isinstance(module, ModuleView):
        module = cast(M, module.__wrapped__)
    return module


def _view_class(kind: type[Module]) -> type:
    names = getattr(sys.modules.get(kind.__module__), "__dict__", {})
    return _lasting_view_class(kind) if names.get(kind.__name__) is kind else _found_view_class(kind)


def _found_view_class(kind: type[Module]) -> type:
    for found in type.__subclasses__(kind):  # which holds them weakly: classes may be made anew for each model
        if found.__bases__ == (ModuleView, kind):
            return found
    own = {
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
        "_reactivate_kind": kind,
    }
    return types.new_class(kind.__name__, (ModuleView, kind), exec_body=lambda names: names.update(own))


_lasting_view_class = functools.lru_cache(maxsize=256)(_found_view_class)  # of classes that are there for good

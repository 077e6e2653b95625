"""torch's own functions, in whose place the drop-in is: what compilers are to trace."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from reactivate.dropin._asked import Asked

Replaced = Mapping[str, Any]
"""torch's functions by their names."""


def checkpoint_of_torch(
    replaced: Replaced, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], asked: Asked
) -> Any:
    """Call torch's `checkpoint` with these options."""
    options = asked._asdict()
    if "_checkpoint_impl" in replaced:  # which torch's `checkpoint` calls
        return replaced["_checkpoint_impl"](function, args, kwargs, use_reentrant=False, **options)
    del options["respect_saved_tensors_hooks"]
    return replaced["checkpoint"](function, *args, use_reentrant=False, **options, **kwargs)


def generator_of_torch(
    replaced: Replaced, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any], asked: Asked
) -> Iterator[None]:
    """Return torch's generator around a region, with these options."""
    name = "_checkpoint_without_reentrant_generator"
    if f"{name}_impl" in replaced:  # which the other one calls
        return replaced[f"{name}_impl"](fn, args, kwargs, **asked._asdict())  # type: ignore[no-any-return]
    return replaced[name](fn, *asked[:-1], *args, **kwargs)  # type: ignore[no-any-return]

"""Storages in files: those of `reactivate.storage` by their names and arguments, which make them again."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from reactivate import storage as storages
from reactivate._types import Storage
from reactivate.errors import UsageError
from reactivate.planner.planned import StorageUse

_PLAIN = (int, float, str, bool, type(None))


def spelled_of(storage: Any) -> dict[str, Any] | None:
    """Return what makes a storage again; None where a file cannot say that.

    Examples:
        >>> from reactivate.planner.spelled import spelled_of
        >>> from reactivate.storage import Host
        >>> spelled_of(Host(limit=2**30))["limit"]
        1073741824
    """
    kind = type(storage).__name__
    if (
        kind not in storages.__all__
        or getattr(storages, kind) is not type(storage)
        or not dataclasses.is_dataclass(storage)
    ):
        return None
    values = {item.name: getattr(storage, item.name) for item in dataclasses.fields(storage) if item.init}
    return {"kind": kind, **values} if all(isinstance(value, _PLAIN) for value in values.values()) else None


def live_of(uses: Iterable[StorageUse], given: Mapping[str, Storage]) -> dict[str, Storage]:
    """Return the storages of a plan by their names: those that are given, else those that its file can make again.

    Raises:
        UsageError: one is given that the plan does not use.
    """
    uses = tuple(uses)
    names = [use.name for use in uses]
    for name, storage in given.items():
        if name not in names:
            raise UsageError(
                f"Plan.load(storages=...): this plan uses {', '.join(names) or 'no storage'}; got {storage!r}."
            )
    made = {use.name: storage_of(use.spelled) for use in uses if use.spelled is not None and use.name not in given}
    return {**made, **given}


def storage_of(spelled: Mapping[str, Any]) -> Storage:
    """Return the storage that `spelled_of` described.

    Raises:
        UsageError: there is none of that kind.
    """
    values = dict(spelled)
    kind = values.pop("kind", None)
    if not isinstance(kind, str) or kind not in storages.__all__:
        raise UsageError(f"A plan with a storage of the kind {kind!r}, which this release does not have.")
    return getattr(storages, kind)(**values)  # type: ignore[no-any-return]

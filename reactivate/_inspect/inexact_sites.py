"""The sites of a region of which a storage that is not exact kept something."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from reactivate._engine.accounts import kept_of, stored_inputs
from reactivate._engine.mismatch.naming import name_of
from reactivate._engine.record import Record
from reactivate._inspect.places import module_of


def inexact_sites(record: Record, paths: Mapping[int, str]) -> Iterator[str]:
    """List them in words.

    Args:
        record: of the region, whose forward is over.
        paths: of modules, by their ids.
    """
    region = paths.get(id(module_of(record))) or name_of(record)
    for spec in stored_inputs(record):
        if spec.is_rounded:
            yield f"inputs of `{region}` in {spec.storage!r}"
    for site in record.sites:
        for kept in kept_of(record, site):
            if kept.is_rounded:
                yield f"{site.label} in `{region}` in {kept.storage!r}"

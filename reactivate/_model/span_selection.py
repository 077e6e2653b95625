"""The spans of a model that a policy names, and whether each of them can be a region."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise

from torch.nn import Module

from reactivate._modules.paths import THE_MODEL
from reactivate._modules.spans import SequentialSpan, SpanPlace, members_at, why_not
from reactivate._types import Policy, Site
from reactivate.errors import UsageError
from reactivate.policies._base import ReadyMade
from reactivate.policies._select import matches


def spans_named(policy: Policy, modules: Mapping[str, Module]) -> dict[SpanPlace, SequentialSpan]:
    """Find the spans that a policy has something to say about.

    Args:
        modules: those of the model, by their paths.

    Raises:
        UsageError: one that is named without `*` is not within a module that calls its members one after the other itself,
            and no other module of that name is one.
    """
    found: dict[SpanPlace, SequentialSpan] = {}
    for text in policy._spans() if isinstance(policy, ReadyMade) else ():
        pattern = SpanPlace.of(text)
        assert pattern is not None
        own, refused = _within(pattern, modules)
        is_named = "*" not in pattern.path and (not own or pattern in refused)
        for place, reason in sorted(refused.items(), key=lambda item: item[0] != pattern) if is_named else ():
            if policy(Site(str(place), module=modules[place.path])) is not None:
                raise UsageError(f"apply: {str(place)!r} cannot be one region: {place.path or THE_MODEL} {reason}.")
        found |= own
    return found


def _within(
    pattern: SpanPlace, modules: Mapping[str, Module]
) -> tuple[dict[SpanPlace, SequentialSpan], dict[SpanPlace, str]]:
    """Return the spans in all modules of that name, and why there is none in others of that name."""
    found, refused = {}, {}
    for path, module in modules.items():
        if path == pattern.path or (path and pattern.path and matches(pattern.path, path)):
            place = pattern._replace(path=path)
            reason = why_not(module, place)
            if reason:
                refused[place] = reason
            else:
                found[place] = members_at(module, place)
    return found, refused


def by_sequential(places: Iterable[SpanPlace]) -> dict[str, tuple[SpanPlace, ...]]:
    """Return spans by the paths of what they are spans of, in the order in which they are called.

    Raises:
        UsageError: two of them overlap.
    """
    found: dict[str, list[SpanPlace]] = {}
    for place in sorted(places):
        found.setdefault(place.path, []).append(place)
    for row in found.values():
        for one, other in pairwise(row):
            if other.start < one.stop:
                raise UsageError(
                    f"apply: the spans {str(one)!r} and {str(other)!r} overlap, and a member is called in one of them. Let "
                    "one begin where the other ends; a region inside of a span may be any member of it, or a module below."
                )
    return {path: tuple(row) for path, row in found.items()}

"""The spans of a model that a policy names, and whether each of them can be a region."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise

from torch.nn import Module

from reactivate._modules.paths import THE_MODEL
from reactivate._modules.spans import SequentialSpan, SpanPlace, members_of, why_without_spans
from reactivate._types import Policy, Site
from reactivate.errors import UsageError
from reactivate.policies._base import ReadyMade
from reactivate.policies._select import matches


def spans_named(policy: Policy, modules: Mapping[str, Module]) -> dict[SpanPlace, SequentialSpan]:
    """Find the spans that a policy has something to say about.

    Args:
        policy: the policy.
        modules: those of the model, by their paths.

    Raises:
        UsageError: one that is named without `*` is not within a module that calls its members one after the other itself.
    """
    found: dict[SpanPlace, SequentialSpan] = {}
    for text in policy.spans() if isinstance(policy, ReadyMade) else ():
        pattern = SpanPlace.of(text)
        assert pattern is not None
        for path, module in modules.items():
            if path == pattern.path or (path and pattern.path and matches(pattern.path, path)):
                place = pattern._replace(path=path)
                reason = _why_not(module, place)
                if not reason:
                    found[place] = SequentialSpan(*members_of(module)[place.start : place.stop])
                elif "*" not in pattern.path and policy(Site(str(place), module=module)) is not None:
                    raise UsageError(f"apply: {str(place)!r} cannot be one region: {path or THE_MODEL} {reason}.")
    return found


def _why_not(module: Module, place: SpanPlace) -> str:
    reason = why_without_spans(module)
    if reason or place.stop <= len(members_of(module)):
        return reason
    return f"has {len(members_of(module))} members, so that the last number of a span is at most that"


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

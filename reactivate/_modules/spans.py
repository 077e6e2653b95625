"""Spans: consecutive members of a `Sequential`, written as Python slices them: "layers[8:16]".

A `Sequential` calls its members one after the other itself, so some of them can be called as one. Those of a `ModuleList` are
called by a loop in the model's own code, where nothing can take several of them together.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from torch.nn import Module, ModuleDict, ModuleList, Sequential

from reactivate._modules.standin import own_forward_of

_SPAN = re.compile(r"(.*)\[(\d+):(\d+)\]")


class SpanPlace(NamedTuple):
    """The place of a span in a model.

    Attributes:
        path: of the `Sequential`, or a pattern of such paths.
        start, stop: the number of its first member, from 0, and of the one after the last.
    """

    path: str
    start: int
    stop: int

    def __str__(self) -> str:
        return f"{self.path}[{self.start}:{self.stop}]"

    @classmethod
    def of(cls, text: str) -> SpanPlace | None:
        """Return the place that a text names; None if it is the path of a module.

        Examples:
            >>> from reactivate._modules.spans import SpanPlace
            >>> SpanPlace.of("encoder.layers[8:16]"), SpanPlace.of("encoder.layers.8")
            (SpanPlace(path='encoder.layers', start=8, stop=16), None)
        """
        found = _SPAN.fullmatch(text)
        return None if found is None else cls(found[1], int(found[2]), int(found[3]))


class SequentialSpan(Sequential):
    """Some consecutive members of a `Sequential`, which share their parameters with it as a slice of it does."""


def kind_of_span(count: int) -> str:
    """Return what reports say of so many members in the place of a class."""
    return f"{count} of a Sequential"


def members_of(sequential: Module) -> list[Any]:
    """Return the members of a `Sequential` as it calls them: one that is there twice as often, and a None, which raises."""
    return list(sequential._modules.values())


def members_at(sequential: Module, place: SpanPlace) -> SequentialSpan:
    """Return the members of a `Sequential` at a place, as they are now."""
    return SequentialSpan(*members_of(sequential)[place.start : place.stop])


def why_not(module: Module, place: SpanPlace) -> str:
    """Say why a module has no span at a place; nothing if it has."""
    reason = why_without_spans(module)
    if reason or place.stop <= len(members_of(module)):
        return reason
    return f"has {len(members_of(module))} members, so that the last number of a span is at most that"


def span_at(model: Module, text: str) -> SequentialSpan | None:
    """Return the span of a model that a text names; None if the model has none there.

    Examples:
        >>> import torch
        >>> from reactivate._modules.spans import span_at
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.Linear(3, 4))
        >>> span_at(model, "[1:3]")
        SequentialSpan(
          (0): ReLU()
          (1): Linear(in_features=3, out_features=4, bias=True)
        )
        >>> span_at(model, "0") is None, span_at(model, "[1:4]") is None
        (True, True)
    """
    place = SpanPlace.of(text)
    around = None if place is None else dict(model.named_modules()).get(place.path)
    return None if place is None or around is None or why_not(around, place) else members_at(around, place)


def paths_in(model: Module, text: str) -> tuple[str, ...] | None:
    """Return the paths of the members of a span of a model; None if the text names none.

    Examples:
        >>> import torch
        >>> from reactivate._modules.spans import paths_in
        >>> model = torch.nn.ModuleDict({"layers": torch.nn.Sequential(*(torch.nn.ReLU() for _ in range(4)))})
        >>> paths_in(model, "layers[1:3]")
        ('layers.1', 'layers.2')
    """
    place = SpanPlace.of(text)
    if place is None or span_at(model, text) is None:
        return None
    names = list(model.get_submodule(place.path)._modules)
    return tuple(f"{place.path}.{name}".lstrip(".") for name in names[place.start : place.stop])


def module_at(model: Module, path: str) -> Module:
    """Return the module, or the span, that a path of a plan names.

    Raises:
        AttributeError: there is none.
    """
    return span_at(model, path) or model.get_submodule(path)


def why_without_spans(module: Module) -> str:
    """Say why several members of a module cannot be called as one; nothing if they can.

    Examples:
        >>> import torch
        >>> from reactivate._modules.spans import why_without_spans
        >>> why_without_spans(torch.nn.Sequential()), why_without_spans(torch.nn.ReLU())
        ('', 'is a ReLU, and only a Sequential calls its members one after the other itself')
    """
    name = type(module).__name__
    if isinstance(module, (ModuleList, ModuleDict)):
        return (
            f"is a {name}, whose members are called one by one by a loop in the model's code; put those that are to be one "
            "region into a Sequential"
        )
    if not isinstance(module, Sequential):
        return f"is a {name}, and only a Sequential calls its members one after the other itself"
    kind = type(module)
    if (
        own_forward_of(module) is not None
        or kind.forward is not Sequential.forward
        or kind.__iter__ is not Sequential.__iter__
    ):
        return (
            f"is a {name} with a forward of its own, which may call its members in another way than a Sequential does"
        )
    return ""

"""The types of a recipe's fields, checked with pydantic."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from reactivate._text.words import did_you_mean
from reactivate.errors import UsageError
from reactivate.integrations.recipe._base import Recipe, needed

R = TypeVar("R", bound=Recipe)


def validated(kind: type[R], given: Mapping[str, Any]) -> R:
    """The recipe of this kind with these fields; `True` is no number here, and 2.0 is none that is whole.

    Raises:
        UsageError: a field is missing or has a value that it cannot have; or pydantic is not installed.
    """
    pydantic = needed("pydantic", "checking a recipe")
    hints = get_type_hints(kind, include_extras=True)
    types = {item.name: (hints[item.name], ... if item.default is MISSING else item.default) for item in fields(kind)}
    config = pydantic.ConfigDict(strict=True, extra="forbid")
    try:
        pydantic.create_model(kind.__name__, __config__=config, **types).model_validate(given)
    except pydantic.ValidationError as error:
        name = error.errors()[0]["loc"][0]
        raise UsageError(_refusal(name, hints[name], given)) from None
    return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in given.items()})


def _refusal(name: str, hint: Any, given: Mapping[str, Any]) -> str:
    (takes,) = hint.__metadata__
    if name not in given:
        return f"recipe: the field {name!r} is missing. It takes {takes}."
    value = given[name]
    meant = did_you_mean(value, _words(hint)) if isinstance(value, str) else ""
    return f"recipe: {name}={value!r} is not allowed.{meant} It takes {takes}."


def _words(hint: Any) -> Iterator[str]:
    """The texts that a type allows by name."""
    for argument in get_args(hint):
        if get_origin(hint) is not Literal:
            yield from _words(argument)
        elif isinstance(argument, str):
            yield argument

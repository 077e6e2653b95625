"""Policies as mappings: as YAML and JSON can write them.

A policy is the name of a function in `reactivate.policies`, alone ("full") or with what it takes: {"save_ops": ["linear"]}.
A function that takes more has its arguments by name: {"save_ops": {"ops": ["linear"], "storage": "host"}}. Any other text
is read as the command line reads one: "save_ops('linear')".
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from reactivate._text.words import did_you_mean
from reactivate._types import Policy, Storage
from reactivate.errors import UsageError
from reactivate.integrations.recipe._grammar import (
    POLICIES,
    STORAGE_NAMES,
    Spelled,
    check_name,
    kinds_of,
    listed,
    signature_of,
)
from reactivate.integrations.recipe._text import read_text


def read_mapping(spelling: Any) -> Spelled:
    """Return the policy that `spelling` spells.

    Raises:
        UsageError: it is the spelling of no policy.
    """
    if isinstance(spelling, str) and not spelling.isidentifier():
        return read_text(spelling)
    name, body = _split(spelling)
    check_name(name, POLICIES)
    return _call(name, body)


def plain(spelled: Spelled) -> Any:
    """Return the shortest spelling, which `read_mapping` reads as this."""
    name = spelled.function if spelled.function in POLICIES else spelled.function.lower()
    given = {key: _plain(value) for key, value in spelled.arguments}
    if not given:
        return name
    parameters = signature_of(spelled.function).parameters
    if _rest(parameters) is not None and given.keys() == _positional(parameters).keys():
        return {name: [item for value in given.values() for item in (value if isinstance(value, list) else [value])]}
    if len(given) == 1 and _is_needed(parameters[next(iter(given))]):
        return {name: next(iter(given.values()))}
    return {name: given}


def _split(spelling: Any) -> tuple[str, Any]:
    if isinstance(spelling, Mapping) and len(spelling) == 1:
        name, body = next(iter(spelling.items()))
        if isinstance(name, str):
            return name, body
    if isinstance(spelling, str):
        return spelling, {}
    raise UsageError(
        f"a policy is a name, as 'full', or a name with what it takes, as {{'save_ops': ['linear']}}; got {spelling!r}."
    )


def _call(function: str, body: Any) -> Spelled:
    parameters = signature_of(function).parameters
    given = _by_name(function, parameters, body)
    for key in given:
        if key not in parameters:
            raise UsageError(
                f"{function} does not take {key or given[key]!r}.{did_you_mean(str(key), parameters)} It takes "
                f"{listed(parameters) or 'nothing'}."
            )
    for key, parameter in parameters.items():
        if key not in given and _is_needed(parameter):
            raise UsageError(f"{function} needs {key!r}. It takes {listed(parameters)}.")
    kinds = kinds_of(function)
    return Spelled.of(
        function, {key: _argument(function, key, kinds[key], given[key]) for key in parameters if key in given}
    )


def _by_name(function: str, parameters: Mapping[str, inspect.Parameter], body: Any) -> Mapping[str, Any]:
    """Return the arguments by name, of which a single one and a list of all may stand without."""
    if isinstance(body, Mapping):
        is_policy = len(body) == 1 and next(iter(body)) in POLICIES and next(iter(body)) not in parameters
        if not is_policy:
            return body
    if isinstance(body, (list, tuple)) and (rest := _rest(parameters)) is not None:
        leading = [name for name in _positional(parameters) if name != rest]
        return {**dict(zip(leading, body)), rest: body[len(leading) :]}
    return {next(iter(_positional(parameters)), ""): body}


def _argument(function: str, name: str, kind: Any, value: Any) -> Any:
    """Return an argument as `Spelled` holds it."""
    if kind == Storage:
        return _storage(function, value)
    if kind != Policy:
        return value
    if name != _rest(signature_of(function).parameters):
        return read_mapping(value)
    if not isinstance(value, (list, tuple)):
        raise UsageError(f"{function}: {name} is a list; got {value!r}.")
    return tuple(map(read_mapping, value))


def _storage(function: str, value: Any) -> Spelled:
    name, body = _split(value) if isinstance(value, (str, Mapping)) else (value, {})
    if name not in STORAGE_NAMES:
        raise UsageError(f"{function}: the storage {value!r} is not known. It takes {listed(STORAGE_NAMES)}.")
    return _call(STORAGE_NAMES[name], body)


def _plain(value: Any) -> Any:
    if isinstance(value, Spelled):
        return plain(value)
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


def _rest(parameters: Mapping[str, inspect.Parameter]) -> str | None:
    """Return the parameter that takes all further positional arguments."""
    return next((name for name, item in parameters.items() if item.kind is item.VAR_POSITIONAL), None)


def _positional(parameters: Mapping[str, inspect.Parameter]) -> Mapping[str, inspect.Parameter]:
    return {name: item for name, item in parameters.items() if item.kind is not item.KEYWORD_ONLY}


def _is_needed(parameter: inspect.Parameter) -> bool:
    return parameter.default is parameter.empty and parameter.kind is not parameter.VAR_POSITIONAL

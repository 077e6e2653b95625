"""Policies in plain words: as YAML and JSON can write them.

A policy is the name of a function in `reactivate.policies`, alone ("full") or with what it takes: {"save_ops": ["linear"]}.
A function that takes more has its arguments by name: {"save_ops": {"ops": ["linear"], "storage": "host"}}.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from reactivate import policies
from reactivate._types import Storage
from reactivate.errors import UsageError
from reactivate.policies._base import ReadyMade
from reactivate.storage import Device, Host

_STORAGES: dict[str, Callable[[], Storage]] = {"device": Device, "host": Host}


@dataclass(frozen=True)
class _Function:
    """The spelling of the arguments of a function in `reactivate.policies`.

    Attributes:
        build: the function.
        takes: what it has to be given.
        many: whether that is a list, as the function's positional arguments.
        options: what it may be given.
    """

    build: Callable[..., ReadyMade]
    takes: tuple[str, ...] = ()
    many: bool = False
    options: tuple[str, ...] = ()


_FUNCTIONS = {
    "full": _Function(policies.full),
    "none": _Function(policies.none),
    "recompute_every": _Function(policies.recompute_every, ("k",), options=("offset",)),
    "recompute_modules": _Function(policies.recompute_modules, ("modules",), many=True),
    "compute_intensive": _Function(policies.compute_intensive, options=("storage",)),
    "save": _Function(policies.save, ("kinds",), many=True, options=("within", "storage")),
    "save_ops": _Function(policies.save_ops, ("ops",), many=True, options=("within", "storage")),
    "save_modules": _Function(policies.save_modules, ("modules",), many=True, options=("storage",)),
    "save_names": _Function(policies.save_names, ("names",), many=True, options=("storage",)),
    "first_match": _Function(policies.first_match, ("policies",), many=True),
    "union": _Function(policies.union, ("policies",), many=True),
    "exclude": _Function(policies.exclude, ("policies",), many=True),
    "every_nth": _Function(policies.every_nth, ("n", "policy"), options=("offset",)),
}


@dataclass(frozen=True)
class Spelled:
    """A policy in plain words, understood.

    Attributes:
        function: the name of a function in `reactivate.policies`.
        arguments: what it takes and how that is called; lists are tuples, policies are `Spelled` themselves.
    """

    function: str
    arguments: tuple[tuple[str, Any], ...] = ()

    def policy(self) -> ReadyMade:
        """The policy.

        Raises:
            UsageError: an argument has a value that the function refuses.
        """
        function = _FUNCTIONS[self.function]
        named = {name: _built(name, value) for name, value in self.arguments}
        positional = named.pop(function.takes[0]) if function.many else ()
        return function.build(*positional, **named)

    def plain(self) -> Any:
        """The shortest spelling, which `understood` reads as this."""
        arguments = {name: _plain(value) for name, value in self.arguments}
        if not arguments:
            return self.function
        if tuple(arguments) == _FUNCTIONS[self.function].takes and len(arguments) == 1:
            return {self.function: next(iter(arguments.values()))}
        return {self.function: arguments}


def understood(spelling: Any) -> Spelled:
    """Return the policy that `spelling` spells.

    Raises:
        UsageError: it is the spelling of no policy.
    """
    name, body = _split(spelling)
    function = _FUNCTIONS.get(name)
    if function is None:
        raise UsageError(
            f"recipe: there is no policy {name!r}.{_meant(name, _FUNCTIONS)} There are: {_listed(_FUNCTIONS)}."
        )
    if not isinstance(body, Mapping) or (len(body) == 1 and next(iter(body)) in _FUNCTIONS):
        body = {function.takes[0] if function.takes else "": body}
    allowed = (*function.takes, *function.options)
    for key in body:
        if key not in allowed:
            takes = _listed(allowed) if allowed else "nothing"
            raise UsageError(
                f"recipe: {name} does not take {key or body[key]!r}.{_meant(key, allowed)} It takes {takes}."
            )
    for key in function.takes:
        if key not in body:
            raise UsageError(f"recipe: {name} needs {key!r}. It takes {_listed(allowed)}.")
    arguments = ((key, _argument(name, key, body[key])) for key in allowed if key in body)
    return Spelled(name, tuple(arguments))


def _split(spelling: Any) -> tuple[str, Any]:
    if isinstance(spelling, Mapping) and len(spelling) == 1:
        name, body = next(iter(spelling.items()))
        if isinstance(name, str):
            return name, body
    if isinstance(spelling, str):
        return spelling, {}
    raise UsageError(
        f"recipe: a policy is a name, as 'full', or a name with what it takes, as {{'save_ops': ['linear']}}; got "
        f"{spelling!r}."
    )


def _argument(function: str, name: str, value: Any) -> Any:
    """An argument, as `Spelled` holds it."""
    if name == "policy":
        return understood(value)
    if name == "policies":
        return tuple(understood(item) for item in _items(function, name, value))
    if name == "storage":
        if value not in _STORAGES:
            raise UsageError(f"recipe: {function}: storage={value!r} is not known. It takes {_listed(_STORAGES)}.")
        return value
    if name in ("k", "n", "offset"):
        return value
    items = _items(function, name, [value] if isinstance(value, str) else value)
    if not all(isinstance(item, str) for item in items):
        raise UsageError(f"recipe: {function}: {name} is a list of texts; got {value!r}.")
    return items


def _items(function: str, name: str, value: Any) -> tuple[Any, ...]:
    if not isinstance(value, (list, tuple)):
        raise UsageError(f"recipe: {function}: {name} is a list; got {value!r}.")
    return tuple(value)


def _built(name: str, value: Any) -> Any:
    """An argument, as the function takes it."""
    if isinstance(value, Spelled):
        return value.policy()
    if name == "policies":
        return tuple(item.policy() for item in value)
    return _STORAGES[value]() if name == "storage" else value


def _plain(value: Any) -> Any:
    if isinstance(value, Spelled):
        return value.plain()
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


def _meant(name: Any, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(str(name), list(known), n=1)
    return f" Did you mean {close[0]!r}?" if close else ""


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))

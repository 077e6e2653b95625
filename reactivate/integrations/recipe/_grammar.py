"""Policies as trees of named calls: one grammar, which is written as a text or as a mapping.

A call is that of a function in `reactivate.policies`, or of a storage where an argument is one. The functions' own
signatures say what they take: policies, a storage, numbers, or lists of texts.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, get_type_hints

from reactivate import policies
from reactivate._text.words import did_you_mean
from reactivate._types import Policy, Storage
from reactivate.errors import UsageError
from reactivate.storage import Device, Disk, Host

Functions = Mapping[str, Callable[..., Any]]

POLICIES: Functions = {name: value for name in policies.__all__ if inspect.isfunction(value := getattr(policies, name))}
STORAGES: Functions = {"Device": Device, "Disk": Disk, "Host": Host}
STORAGE_NAMES = {name.lower(): name for name in STORAGES}


@dataclass(frozen=True)
class Spelled:
    """A call, understood.

    Attributes:
        function: the name of a function in `reactivate.policies`, or of a storage.
        arguments: what it takes, by the names of its parameters; lists are tuples, calls are `Spelled` themselves.
    """

    function: str
    arguments: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def of(cls, function: str, arguments: Mapping[str, Any]) -> Spelled:
        """Return the call of `function` with arguments by name, checked.

        Raises:
            UsageError: an argument is of another kind than the function takes.
        """
        kinds = kinds_of(function)
        return cls(
            function, tuple((name, _checked(function, name, kinds[name], arguments[name])) for name in arguments)
        )

    def built(self) -> Any:
        """Return the policy, or the storage.

        Raises:
            UsageError: an argument has a value that the function refuses.
        """
        function = _function_of(self.function)
        bound = signature_of(self.function).bind_partial()
        bound.arguments.update({name: _built(value) for name, value in self.arguments})
        return function(*bound.args, **bound.kwargs)


def check_name(function: Any, known: Functions) -> None:
    """See to it that a function is among the known ones.

    Raises:
        UsageError: it is not.
    """
    if function not in known:
        thing = "storage" if known is STORAGES else "policy"
        raise UsageError(
            f"there is no {thing} {function!r}.{did_you_mean(str(function), known)} There are: {listed(known)}."
        )


def signature_of(function: str) -> inspect.Signature:
    """Return the signature of a function."""
    return inspect.signature(_function_of(function))


def kinds_of(function: str) -> Mapping[str, Any]:
    """Return the types of a function's parameters: `Policy`, `Storage`, a number's, a text's; others are lists of texts."""
    return get_type_hints(_function_of(function))


def listed(names: Iterable[str]) -> str:
    """Return names as a message lists them."""
    return ", ".join(map(repr, names))


def _function_of(name: str) -> Callable[..., Any]:
    return POLICIES[name] if name in POLICIES else STORAGES[name]


def _checked(function: str, name: str, kind: Any, value: Any) -> Any:
    if kind in (int, bool, int | None, int | str, int | str | None):
        return value
    is_list = signature_of(function).parameters[name].kind is inspect.Parameter.VAR_POSITIONAL
    if kind in (Policy, Storage):
        known, takes = (POLICIES, "policies") if kind == Policy else (STORAGES, "storages")
        for item in value if is_list else (value,):
            if not isinstance(item, Spelled) or item.function not in known:
                raise UsageError(f"{function}: {name} takes {takes}; got {item!r}.")
        return value
    if kind is str and not is_list:
        if not isinstance(value, str):
            raise UsageError(f"{function}: {name} is a text; got {value!r}.")
        return value
    texts = (value,) if isinstance(value, str) else value
    if not isinstance(texts, (tuple, list)):
        raise UsageError(f"{function}: {name} is a list; got {value!r}.")
    if not all(isinstance(text, str) for text in texts):
        raise UsageError(f"{function}: {name} is a list of texts; got {list(texts)!r}.")
    return tuple(texts)


def _built(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_built, value))
    return value.built() if isinstance(value, Spelled) else value

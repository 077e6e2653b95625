"""Module-level names that a function reads: tensors to watch, modules and generators that hold state.

Which names a code object reads is found once a code object and kept; what they stand for is looked up at every call.
Names are followed through helper functions of the same Python module. An attribute of something else (`config.table`)
is not followed: the docs list that under Limits.
"""

from __future__ import annotations

import dis
import functools
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module


class Watched:
    """A tensor that a replay reads by name: name, tensor and version must be what they were."""

    __slots__ = ("name", "namespace", "tensor", "version")

    def __init__(self, name: str, namespace: dict[str, Any], tensor: Tensor) -> None:
        self.name = name
        self.namespace = namespace
        self.tensor = tensor
        self.version = tensor._version

    def what_changed(self) -> str | None:
        """What happened to it since, or None."""
        if self.namespace.get(self.name) is not self.tensor:
            return "now names another object"
        if self.tensor._version != self.version:
            return "was written to in place"
        return None


Names = tuple[tuple[dict[str, Any], str], ...]


class Facts(NamedTuple):
    """What is known of a function from its code.

    Attributes:
        code: kept, so that its id stays its own.
        names: (namespace, name) of everything at module level that it reads and that may hold state.
        assigned: the closed-over variables that it assigns to, itself or in a function within it.
    """

    code: CodeType
    names: Names
    assigned: frozenset[str]


facts_of_code: dict[int, Facts] = {}  # by the id of the code object


def find_facts(fn: FunctionType) -> Facts:
    """The facts of `fn`, from now on in `facts_of_code`."""
    code = fn.__code__
    facts = facts_of_code[id(code)] = Facts(code, tuple(_find(fn.__globals__, [code])), _assigned_cells(code))
    return facts


class ClassFacts(NamedTuple):
    """What is known of a module's class.

    Attributes:
        names: (namespace, name) of everything at module level that its methods read and that may hold state.
        is_users: whether it is not one of `torch.nn`'s, whose attributes are known to be plain.
    """

    names: Names
    is_users: bool


@functools.cache
def facts_of_class(kind: type) -> ClassFacts:
    """The facts of a module's class."""
    return ClassFacts(tuple(_find_in_class(kind)), not kind.__module__.startswith("torch.nn.modules."))


def _find_in_class(kind: type) -> Iterator[tuple[dict[str, Any], str]]:
    for base in kind.__mro__:
        if base is Module:
            return
        functions = [item for item in vars(base).values() if isinstance(item, FunctionType)]
        for fn in functions:
            yield from (facts_of_code.get(id(fn.__code__)) or find_facts(fn)).names


def _find(namespace: dict[str, Any], todo: list[CodeType]) -> Iterator[tuple[dict[str, Any], str]]:
    if str(namespace.get("__name__", "")).partition(".")[0] in ("reactivate", "torch"):
        return  # these keep no state of the user's at module level
    seen: set[str] = set()
    while todo:
        code = todo.pop()
        for name in _global_names(code) - seen:
            seen.add(name)
            value = namespace.get(name)
            if isinstance(value, FunctionType) and value.__globals__ is namespace:
                todo.append(value.__code__)
            elif isinstance(value, (Tensor, Module, torch.Generator, list, tuple, dict)):
                yield namespace, name


def _assigned_cells(code: CodeType) -> frozenset[str]:
    assigns = ("STORE_DEREF", "DELETE_DEREF")
    names = {step.argval for step in dis.get_instructions(code) if step.opname in assigns}
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            names |= _assigned_cells(inner)
    return frozenset(names & set(code.co_freevars))


@functools.cache
def _global_names(code: CodeType) -> frozenset[str]:
    names = {step.argval for step in dis.get_instructions(code) if step.opname == "LOAD_GLOBAL"}
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            names |= _global_names(inner)
    return frozenset(names)

"""A policy from a text: calls of functions in `reactivate.policies`, and nothing else.

The text is parsed and never evaluated. Every node of its tree is one of those below, or it is refused.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from reactivate import policies, storage
from reactivate._nearest import did_you_mean
from reactivate._types import Policy
from reactivate.errors import UsageError

LONGEST = 10_000  # characters

_POLICIES: Mapping[str, Callable[..., Any]] = {
    name: value for name in policies.__all__ if inspect.isfunction(value := getattr(policies, name))
}
_STORAGES: Mapping[str, Callable[..., Any]] = {"Device": storage.Device, "Host": storage.Host}


def parse_policy(text: str, asked_by: str = "--policy") -> Policy:
    """Return the policy that `text` writes, as in Python.

    Args:
        text: one call of a function in `reactivate.policies`. Its arguments are literals, lists of them, other such calls,
            and the storages `Host()` and `Device()`.
        asked_by: the option or the function that was given the text, for errors.

    Raises:
        UsageError: it is anything else; or a function does not take what it is given.

    Example:
        >>> from reactivate.recipe._text import parse_policy
        >>> parse_policy("first_match(save_ops('linear'), full())")
        first_match(save_ops('linear'), full())
    """
    try:
        return _parsed(text)
    except UsageError as error:
        raise UsageError(f"{asked_by}: {error}") from None


def _parsed(text: str) -> Policy:
    if len(text) > LONGEST:
        raise UsageError(f"a text of {len(text)} characters; at most {LONGEST} are read.")
    try:
        tree = ast.parse(text.strip(), mode="eval").body
        policy: Policy = _call(tree, _POLICIES, text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(f"{_short(text)} is not an expression: {getattr(error, 'msg', error)}.") from None
    return policy


def _call(node: ast.AST, known: Mapping[str, Callable[..., Any]], text: str) -> Any:
    if isinstance(node, ast.Name) and node.id in known:
        raise UsageError(f"{node.id} is a function; write the call: {node.id}(...).")
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        raise _refusal(node, text)
    name = node.func.id
    if name not in known:
        there_are = ", ".join(sorted(_POLICIES))
        raise UsageError(f"there is no {name!r}.{did_you_mean(name, known)} There are {there_are}.")
    if any(keyword.arg is None for keyword in node.keywords):
        raise _refusal(node, text)
    args = [_value(item, text) for item in node.args]
    kwargs = {str(keyword.arg): _value(keyword.value, text) for keyword in node.keywords}
    try:
        return known[name](*args, **kwargs)
    except TypeError as error:
        raise UsageError(f"{name} does not take this: {error}.") from None


def _value(node: ast.AST, text: str) -> Any:
    """A literal, a list of values, a policy, a storage."""
    if isinstance(node, ast.Constant) and isinstance(node.value, (str, int, float, bool, type(None))):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        number = _value(node.operand, text)
        if type(number) in (int, float):
            return -number
    if isinstance(node, (ast.Tuple, ast.List)):
        return tuple(_value(item, text) for item in node.elts)
    if isinstance(node, (ast.Call, ast.Name)):
        return _call(node, {**_POLICIES, **_STORAGES}, text)
    raise _refusal(node, text)


def _refusal(node: ast.AST, text: str) -> UsageError:
    part = ast.get_source_segment(text.strip(), node) or text
    return UsageError(
        f"{_short(part)} is neither a literal nor a call of a function in reactivate.policies. Write, say, "
        "first_match(save_ops('linear'), full())."
    )


def _short(text: str) -> str:
    return repr(text if len(text) <= 80 else text[:77] + "...")

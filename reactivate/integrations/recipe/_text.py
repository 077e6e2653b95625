"""Policies as texts: calls of functions in `reactivate.policies`, and nothing else.

The text is parsed and never evaluated. Every node of its tree is one of those below, or it is refused.
"""

from __future__ import annotations

import ast
from typing import Any

from reactivate._text.words import did_you_mean
from reactivate._types import Policy, Storage
from reactivate.errors import UsageError
from reactivate.integrations.recipe._grammar import (
    POLICIES,
    STORAGE_NAMES,
    STORAGES,
    Functions,
    Spelled,
    check_name,
    signature_of,
)

LONGEST = 10_000  # characters


def parse_policy(text: str, asked_by: str = "--policy") -> Policy:
    """Return the policy that `text` writes, as in Python.

    Args:
        text: one call of a function in `reactivate.policies`. Its arguments are literals, lists of them, other such calls,
            and the storages `Host()`, `Disk(path)` and `Device()`.
        asked_by: the option or the function that was given the text, for errors.

    Raises:
        UsageError: it is anything else; or a function does not take what it is given.

    Examples:
        >>> from reactivate.integrations.recipe._text import parse_policy
        >>> parse_policy("first_match(save_ops('linear'), full())")
        first_match(save_ops('linear'), full())
    """
    try:
        policy: Policy = read_text(text).built()
    except UsageError as error:
        raise UsageError(f"{asked_by}: {error}") from None
    return policy


def parse_storage(text: str, asked_by: str) -> Storage:
    """Return the storage that `text` writes, as in Python, or names: "host".

    Args:
        text: a call of `Host`, `Disk` or `Device` with literals, or the name of one that needs no arguments.
        asked_by: the option or the function that was given the text, for errors.

    Raises:
        UsageError: it is anything else.

    Examples:
        >>> from reactivate.integrations.recipe._text import parse_storage
        >>> parse_storage("Host(limit=1000)", "--storage").limit, parse_storage("host", "--storage").limit
        (1000, None)
    """
    text = text.strip()
    name = STORAGE_NAMES.get(text.lower())
    if name is None and text.isidentifier():
        hint = did_you_mean(text, STORAGE_NAMES)
        raise UsageError(f"{asked_by}: {text!r} is no storage.{hint} Write host, Host(limit='8GiB') or Disk('path').")
    try:
        storage: Storage = _read(text if name is None else f"{name}()", STORAGES).built()
    except (UsageError, TypeError) as error:
        raise UsageError(f"{asked_by}: {error}") from None
    return storage


def read_text(text: str) -> Spelled:
    """Return the policy that `text` spells.

    Raises:
        UsageError: it is the spelling of no policy.
    """
    return _read(text, POLICIES)


def _read(text: str, known: Functions) -> Spelled:
    if len(text) > LONGEST:
        raise UsageError(f"a text of {len(text)} characters; at most {LONGEST} are read.")
    try:
        return _call(ast.parse(text.strip(), mode="eval").body, known, text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(f"{_short(text)} is not an expression: {getattr(error, 'msg', error)}.") from None


def _call(node: ast.AST, known: Functions, text: str) -> Spelled:
    if isinstance(node, ast.Name) and node.id in known:
        raise UsageError(f"{node.id} is a function; write the call: {node.id}(...).")
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        raise _refusal(node, text)
    name = node.func.id
    check_name(name, known)
    if any(keyword.arg is None for keyword in node.keywords):
        raise _refusal(node, text)
    args = [_value(item, text) for item in node.args]
    kwargs = {str(keyword.arg): _value(keyword.value, text) for keyword in node.keywords}
    try:
        given = signature_of(name).bind(*args, **kwargs)
    except TypeError as error:
        raise UsageError(f"{name} does not take this: {error}.") from None
    return Spelled.of(name, given.arguments)


def _value(node: ast.AST, text: str) -> Any:
    """Return a literal, a list of values, or a call."""
    if isinstance(node, ast.Constant) and isinstance(node.value, (str, int, float, bool, type(None))):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        number = _value(node.operand, text)
        if type(number) in (int, float):
            return -number
    if isinstance(node, (ast.Tuple, ast.List)):
        return tuple(_value(item, text) for item in node.elts)
    if isinstance(node, (ast.Call, ast.Name)):
        return _call(node, {**POLICIES, **STORAGES}, text)
    raise _refusal(node, text)


def _refusal(node: ast.AST, text: str) -> UsageError:
    part = ast.get_source_segment(text.strip(), node) or text
    return UsageError(
        f"{_short(part)} is neither a literal nor a call of a function in reactivate.policies. Write, say, "
        "first_match(save_ops('linear'), full())."
    )


def _short(text: str) -> str:
    return repr(text if len(text) <= 80 else text[:77] + "...")

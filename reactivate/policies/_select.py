"""Selecting modules: by path, by class, by predicate."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable

from torch.nn import Module

from reactivate._types import Site
from reactivate.errors import UsageError

Selector = str | type | Callable[[Site], bool]


def check(selectors: tuple[Selector, ...], asked_by: str) -> None:
    """See to it that each of `selectors` is one.

    Raises:
        UsageError: one is not.
    """
    for selector in selectors:
        is_class = isinstance(selector, type) and issubclass(selector, Module)
        if not (is_class or (isinstance(selector, str) and selector) or _is_predicate(selector)):
            raise UsageError(
                f"{asked_by} selects modules by the end of their path ('*.attn'), by class, or by a function of the "
                f"site; {selector!r} is none of these."
            )


def selects(selectors: tuple[Selector, ...], site: Site) -> bool:
    """Return whether one of `selectors` is for the module of `site`, or the module that its function is called in."""
    for selector in selectors:
        if isinstance(selector, str):
            if matches(selector, site.path):
                return True
        elif isinstance(selector, type):
            if isinstance(site.module, selector):
                return True
        elif selector(site):
            return True
    return False


def matches(pattern: str, path: str) -> bool:
    """Return whether `path` ends as `pattern` says: `*` stands for one name, `**` for any number of them."""
    return _compiled(pattern).search(f"{path}.") is not None


@functools.cache
def _compiled(pattern: str) -> re.Pattern[str]:
    names = []
    for name in pattern.split("."):
        if name == "**":
            names.append("(?:[^.]+\\.)*")
        else:
            names.append(re.escape(name).replace("\\*", "[^.]*").replace("\\?", "[^.]") + "\\.")
    return re.compile("(?:^|(?<=\\.))" + "".join(names) + "$")


def _is_predicate(selector: object) -> bool:
    return callable(selector) and not isinstance(selector, type)

"""The libraries that the integrations are for, none of which is a dependency."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from reactivate.errors import UsageError


def bases_of(modules: Iterable[str], name: str) -> tuple[Any, ...]:
    """Return the classes called `name`, from those of the modules whose packages are installed.

    Args:
        modules: their paths. A module without its package is left out; one that cannot be imported raises as it does.
        name: of the class.

    Examples:
        >>> from reactivate.integrations._hosts import bases_of
        >>> [base.__name__ for base in bases_of(["torch.nn", "not_installed.nn"], "Module")]
        ['Module']
    """
    installed = [module for module in modules if find_spec(module.partition(".")[0]) is not None]
    return tuple(getattr(import_module(module), name) for module in installed)


def check_host(found: object, asked_by: str, packages: str) -> None:
    """See to it that a host is installed.

    Args:
        found: what was found of it: empty or None if it is not installed.
        asked_by: the class or function that needs it.
        packages: what to install, as `pip install` takes it.

    Raises:
        UsageError: it is not.
    """
    if not found:
        raise UsageError(f"{asked_by} needs a package that is not installed: pip install {packages}.")

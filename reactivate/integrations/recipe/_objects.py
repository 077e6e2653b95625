"""Configurations that are objects of Python: dataclasses, as torchtitan has them."""

from __future__ import annotations

from dataclasses import asdict, is_dataclass
from typing import Any

from reactivate.errors import UsageError
from reactivate.integrations.recipe._torchtitan_classes import CLASSES


def is_object(source: Any) -> bool:
    """Return whether `source` is an instance of a dataclass."""
    return is_dataclass(source) and not isinstance(source, type)


def fields_of(source: Any) -> dict[str, Any]:
    """Return the fields of a configuration, as mappings and lists; with the class as the mode, where that is one.

    Raises:
        UsageError: it is of a class derived from one of torchtitan's, which may do anything.
    """
    given = asdict(source)
    if "mode" in given:
        return given
    owner, _, kind = type(source).__qualname__.rpartition(".")
    name = owner.rpartition(".")[2]
    if kind == "Config" and name in CLASSES:
        return {**given, "mode": name}
    raise UsageError(
        f"recipe: {type(source).__qualname__} is none of the classes that are known: {', '.join(CLASSES)}, each with its "
        "Config. A class of your own may save other ops: write its policy, as in {'policy': {'first_match': "
        "[{'save_ops': [...]}, 'full']}}."
    )

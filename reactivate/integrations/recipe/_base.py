"""Recipes: the part that all kinds of fields share."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from importlib import import_module
from typing import Any, ClassVar

from torch.nn import Module

from reactivate._options import CheckMode
from reactivate._types import Policy
from reactivate.errors import UsageError
from reactivate.guards import DEFAULT, Guards
from reactivate.planner.step import Loss

OP_OR_NUMBER = "'op', or k for every k-th layer: a whole number of at least 1"


@dataclass(frozen=True)
class Example:
    """One call of the model, which a plan is made for.

    Attributes:
        args, kwargs, loss: as for `reactivate.plan`.
    """

    args: Any = ()
    kwargs: Mapping[str, Any] | None = None
    loss: Loss | None = None


@dataclass(frozen=True)
class Settings:
    """The options of `reactivate.apply` beside the policy.

    Attributes:
        guards, early_stop, check: as there.
    """

    guards: Guards = DEFAULT
    early_stop: bool = True
    check: CheckMode = "first"


@dataclass(frozen=True, repr=False)
class Recipe:
    """A configuration that has been checked as far as it can be without a model. A subclass declares the fields,
    each with what it takes.

    Examples:
        >>> import reactivate
        >>> recipe = reactivate.integrations.recipe.load({"ac_mode": "selective", "ac_option": 2})
        >>> recipe.to_dict()
        {'ac_mode': 'selective', 'ac_option': 2}
        >>> recipe == reactivate.integrations.recipe.load(recipe.to_dict())
        True
    """

    whose: ClassVar[str]
    """What messages call those who made up the fields."""

    @classmethod
    def takes(cls, given: Mapping[str, Any]) -> bool:
        """Return whether `given` may be a recipe of this kind: all of its keys are fields."""
        return given.keys() <= {item.name for item in fields(cls)}

    @classmethod
    def prepared(cls, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return `given`, written as this kind of recipe is checked."""
        return given

    def policy_for(self, model: Module, example: Example | None = None) -> Policy:
        """Return the policy for `model`.

        Args:
            model: the model.
            example: one call of it, which a memory budget needs to become a plan.

        Raises:
            UsageError: `model` does not have what the recipe names, or the recipe needs an example.
        """
        raise NotImplementedError

    def settings(self) -> Settings:
        """Return the other options of `reactivate.apply`."""
        return Settings()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.to_dict().items())})"

    def to_dict(self) -> dict[str, Any]:
        """The fields that are not at their default, as `load` takes them and YAML can write them."""
        given = ((item.name, getattr(self, item.name), item.default) for item in fields(self))
        changed = ((name, value) for name, value, default in given if value != default)
        return {name: list(value) if isinstance(value, tuple) else value for name, value in changed}


def check_op_or_number(field: str, option: int | str | None) -> None:
    """See to it that an option of a selective mode is one, if it is given.

    Raises:
        UsageError: it is neither "op" nor a number of layers.
    """
    if option is not None and option != "op" and not re.fullmatch("[1-9][0-9]*", str(option)):
        raise UsageError(f"recipe: {field}={option!r} is not allowed. It takes {OP_OR_NUMBER}.")


def needed(module: str, purpose: str) -> Any:
    """A module of the extra `recipe`.

    Raises:
        UsageError: it is not installed.
    """
    try:
        return import_module(module)
    except ImportError as error:
        raise UsageError(f"recipe: {purpose} needs {module}: pip install pydantic pyyaml.") from error

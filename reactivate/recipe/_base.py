"""What a recipe is, whoever's fields it has."""

from __future__ import annotations

from dataclasses import dataclass, fields
from importlib import import_module
from typing import Any, ClassVar

from torch.nn import Module

from reactivate._checkpoint import Determinism
from reactivate._types import Policy
from reactivate.errors import UsageError
from reactivate.guards import DEFAULT, Guards

OP_OR_NUMBER = "'op', or k for every k-th layer: a whole number of at least 1"


@dataclass(frozen=True)
class Settings:
    """The options of `reactivate.apply` beside the policy.

    Attributes:
        guards, early_stop, determinism: as there.
    """

    guards: Guards = DEFAULT
    early_stop: bool = True
    determinism: Determinism = "first"


@dataclass(frozen=True, repr=False)
class Recipe:
    """A configuration that has been checked as far as it can be without a model. A subclass declares the fields,
    each with what it takes.

    Example:
        >>> import reactivate
        >>> recipe = reactivate.recipe.load({"ac_mode": "selective", "ac_option": 2})
        >>> recipe.to_dict()
        {'ac_mode': 'selective', 'ac_option': 2}
        >>> recipe == reactivate.recipe.load(recipe.to_dict())
        True
    """

    whose: ClassVar[str]
    """What messages call those who made up the fields."""

    def policy_for(self, model: Module) -> Policy:
        """The policy for `model`.

        Raises:
            UsageError: `model` has not what the recipe names.
        """
        raise NotImplementedError

    def settings(self) -> Settings:
        """The other options of `reactivate.apply`."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.to_dict().items())})"

    def to_dict(self) -> dict[str, Any]:
        """The fields that are not at their default, as `load` takes them and YAML can write them."""
        given = {item.name: getattr(self, item.name) for item in fields(self)}
        changed = {item.name: given[item.name] for item in fields(self) if given[item.name] != item.default}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in changed.items()}


def needed(module: str, purpose: str) -> Any:
    """A module of the extra `recipe`.

    Raises:
        UsageError: it is not installed.
    """
    try:
        return import_module(module)
    except ImportError as error:
        raise UsageError(f"recipe: {purpose} needs {module}: pip install pydantic pyyaml.") from error

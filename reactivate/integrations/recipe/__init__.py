"""Recipes: activation checkpointing from a configuration, read strictly.

A recipe is a mapping or a YAML file with torchtune's fields, with torchtitan's, or with a policy of ours. Whatever in it
cannot be done as it says is refused, with what can be.
"""

from reactivate.integrations.recipe._base import Example, Recipe, Settings
from reactivate.integrations.recipe._load import apply, load

__all__ = ["Example", "Recipe", "Settings", "apply", "load"]

"""Our own fields."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from torch.nn import Module

from reactivate._options import CheckMode
from reactivate._types import Policy
from reactivate.errors import UsageError
from reactivate.guards import DEFAULT
from reactivate.integrations.recipe._base import Example, Recipe, Settings
from reactivate.integrations.recipe._grammar import Spelled
from reactivate.integrations.recipe._mapping import plain, read_mapping


@dataclass(frozen=True, repr=False)
class Native(Recipe):
    """A policy in plain words, and the options of `reactivate.apply`."""

    whose = "reactivate"

    policy: Annotated[Any, "a policy, such as 'full' or {'first_match': [{'save_ops': ['linear']}, 'full']}"]
    without_guards: Annotated[Sequence[str], "a list of names of guards"] = ()
    early_stop: Annotated[bool, "True or False"] = True
    check: Annotated[CheckMode, "'first', 'every', 'metadata' or 'none'"] = "first"

    def __post_init__(self) -> None:
        try:
            if not isinstance(self.policy, Spelled):
                object.__setattr__(self, "policy", read_mapping(self.policy))
            self.policy.built()  # refuses what is wrong in it
        except UsageError as error:
            raise UsageError(f"recipe: {error}") from None
        self.settings()  # refuses guards that there are not

    def policy_for(self, model: Module, example: Example | None = None) -> Policy:
        return self.policy.built()  # type: ignore[no-any-return]

    def settings(self) -> Settings:
        return Settings(DEFAULT.without(*self.without_guards), self.early_stop, self.check)

    def to_dict(self) -> dict[str, Any]:
        return super().to_dict() | {"policy": plain(self.policy)}

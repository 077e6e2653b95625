"""The options of regions, checked once and shared by all calls of one checkpointed function."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

from reactivate._saved_calls.choice import Choice
from reactivate._types import DEVICE, Guard, Storage
from reactivate.errors import ReactivateError

Before = Callable[[Any], Any]
After = Callable[[Any], Any]
Recomputation = Callable[[Any], "AbstractContextManager[Any] | None"]


@dataclass(frozen=True)
class Options:
    """The options of regions.

    Attributes:
        guards: the state that recomputations restore.
        early_stop, check, name, inputs: as given to `checkpoint`.
        choice: which calls inside to save, if a policy says.
        in_graph: the same for torch.compile: a function for the contexts around the traced region.
        befores, recomputations: `before` and `recompute` of the guards that the engine asks.
        afters: (index, `after`) of those that have one.
        are_ordinary: whether they ask of most calls nothing but the recomputation; see `Region.is_ordinary`.
        restores_modules: whether modules are restored, by the engine itself.
        has_leaving: whether a guard has something to close after the forward.
        checks_versions: whether tensors of a recomputation have the versions of the forward.
        innermost: the `recompute` of guards that are entered when all other state is as it was.
        random: the guards of random numbers, which say where these are.
        compared: the other guards whose `before` may be asked at any time.
    """

    guards: tuple[Guard, ...] = ()
    early_stop: bool = True
    check: str = "first"
    name: str | None = None
    choice: Choice | None = None
    in_graph: Any = None
    inputs: Storage = DEVICE
    asked: tuple[Guard, ...] = field(init=False, repr=False, compare=False)
    befores: tuple[Before, ...] = field(init=False, repr=False, compare=False)
    recomputations: tuple[Recomputation, ...] = field(init=False, repr=False, compare=False)
    afters: tuple[tuple[int, After], ...] = field(init=False, repr=False, compare=False)
    are_ordinary: bool = field(init=False, repr=False, compare=False)
    restores_modules: bool = field(init=False, repr=False, compare=False)
    has_leaving: bool = field(init=False, repr=False, compare=False)
    checks_versions: bool = field(init=False, repr=False, compare=False)
    innermost: tuple[Recomputation, ...] = field(init=False, repr=False, compare=False)
    random: tuple[Any, ...] = field(init=False, repr=False, compare=False)
    compared: tuple[Guard, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # What is called for every region, found once.
        asked = tuple(guard for guard in self.guards if not guard.is_of_modules)
        found = {
            "asked": asked,
            "befores": tuple(guard.before for guard in asked),
            "recomputations": tuple(guard.recompute for guard in asked),
            "afters": tuple((i, guard.after) for i, guard in enumerate(asked) if type(guard).after is not Guard.after),
            "restores_modules": len(asked) < len(self.guards),
            "checks_versions": not any(guard.replaces_tensors for guard in asked),
            "innermost": tuple(guard.recompute for guard in asked if guard.is_innermost),
            "random": tuple(guard for guard in asked if hasattr(guard, "position")),
            "compared": tuple(
                guard for guard in asked if not hasattr(guard, "position") and type(guard).leave is Guard.leave
            ),
            "has_leaving": any(type(guard).leave is not Guard.leave for guard in asked),
        }
        for name, value in found.items():
            object.__setattr__(self, name, value)
        is_ordinary = self.choice is None and self.check == "first" and not (self.has_leaving or self.innermost)
        object.__setattr__(self, "are_ordinary", is_ordinary)

    def of(self, name: str | None, choice: Choice | None, in_graph: Any, inputs: Storage | None = None) -> Options:
        """Return these options for a region of that name, with what a policy says of its inside and of its inputs."""
        return replace(self, name=name, choice=choice, in_graph=in_graph, inputs=inputs or self.inputs)

    def exception(self, error: ReactivateError) -> BaseException:
        """Return the error to raise for `error`: a drop-in makes it the peer's own type as well (Rule 18)."""
        return error

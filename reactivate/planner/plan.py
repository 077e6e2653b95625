"""A plan: a policy that a solver wrote, with the promise that it was chosen for."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel

from reactivate._region.accounts import in_words
from reactivate._types import Action, Site, Storage
from reactivate.errors import UsageError
from reactivate.planner.budget import Budget, parse
from reactivate.planner.by_value.call_names import CallName
from reactivate.planner.call_watch import watching_loaded
from reactivate.planner.cost.prediction import Copy, Fixed, LiveBytes, LiveTensors, Point, Prediction, Proof
from reactivate.planner.differences import differences_of
from reactivate.planner.digest import bucket_bytes, class_name_of
from reactivate.planner.offers import storages_in
from reactivate.planner.plan_table import html, text
from reactivate.planner.planned import Circumstances, Decision, Planned, StorageUse
from reactivate.planner.spelled import live_of
from reactivate.planner.treatments import Assignment, Treatment
from reactivate.policies._base import Interest, ReadyMade

VERSION = 1


class Runner(Protocol):
    """A runner: it can still run the step that a plan was made for."""

    @property
    def is_shared(self) -> bool:
        """True if several ranks plan together."""

    @property
    def device_bytes(self) -> int:
        """The memory of the device that it runs on; 0 where nobody says."""

    def replan(self, budget: Budget | None) -> Plan:
        """Return the plan for another budget."""

    def least_bytes(self) -> int:
        """Return the least budget for which there is a plan."""

    def measure(self, plan: Plan, *, compiled: bool | str = False) -> Any:
        """Run it with `plan`, compiled if that is asked for."""

    def watch(self, model: Module, plan: Plan) -> Callable[[], None]:
        """Warn when `model` is called with other shapes. Returns what ends that."""


@dataclass(frozen=True, repr=False)
class Plan(Planned, ReadyMade):
    """A policy that fits a step into a budget: give it to `apply`. Printed, it is a table; its figures are attributes.

    It has all attributes of `Planned`, and two more that a file has not.

    Attributes:
        runner: what can still run the step: `measure`, `at` and warnings about other shapes need it. A file has none.
        live: the storages themselves, by their names.
    """

    runner: Runner | None = field(default=None, compare=False, metadata={"json": False})
    live: Mapping[str, Storage] = field(default_factory=dict, compare=False, metadata={"json": False})

    def __post_init__(self) -> None:
        if self.runner is not None:  # a file has what the runner said
            object.__setattr__(self, "device_bytes", self.runner.device_bytes)

    # -- a policy -----------------------------------------------------------------------------------------------------

    @functools.cached_property
    def assignment(self) -> Assignment:
        """The policy itself."""
        return Assignment({decision.path: decision.treatment for decision in self.decisions}, self.live)

    def determinism(self) -> Literal["metadata"]:
        return "metadata"

    def __call__(self, site: Site) -> Action | None:
        return self.assignment(site)

    def __repr__(self) -> str:
        counts: dict[str, int] = {}
        for decision in self.decisions:
            counts[decision.treatment.name] = counts.get(decision.treatment.name, 0) + 1
        done = ", ".join(f"{count} x {name}" for name, count in counts.items())
        return f"Plan({self.made_for.model} in {in_words(self.budget_bytes)}: {done})"

    def __str__(self) -> str:
        return text(self)

    def _repr_html_(self) -> str:
        return html(self)

    def __hash__(self) -> int:
        return hash((self.made_for, self.decisions))

    def __deepcopy__(self, memo: dict[int, Any]) -> Plan:
        return self

    def __reduce__(self) -> tuple[Callable[..., Plan], tuple[Any, ...]]:
        return _again, (self.to_json(), self.live)  # without the step, which may be made of anything

    def interest(self) -> Interest:
        return self.assignment.interest()

    def inside(self, path: str) -> Any:
        return self.assignment.inside(path)

    def spans(self) -> tuple[str, ...]:
        return self.assignment.spans()

    @property
    def may_match_nothing(self) -> bool:
        return True

    @property
    def is_found(self) -> bool:
        return True

    def applied_to(self, model: Module) -> Callable[[], None]:
        for use in self.storages:
            if use.name not in self.live:
                raise UsageError(
                    f"apply: this plan keeps tensors in {use.written}, a storage that no file can make again. Load the plan "
                    "with it: Plan.load(path, storages=[...])."
                )
        if isinstance(model, DistributedDataParallel) and self.made_for.model != class_name_of(model):
            raise UsageError(
                f"apply: this plan was made for {self.made_for.model}, which DistributedDataParallel has wrapped since. Its "
                f"buckets take {in_words(bucket_bytes(model))} that the plan does not count. Plan the wrapped model."
            )
        differences = list(differences_of(model, self.made_for.units, self.decisions))
        if differences:
            raise UsageError(
                f"apply: this plan was made for {self.made_for.model}, and this model is another: "
                f"{'; '.join(differences[:3])}{'; ...' if len(differences) > 3 else ''}. Plan again, for this model."
            )
        return watching_loaded(model, self) if self.runner is None else self.runner.watch(model, self)

    # -- its step -------------------------------------------------------------------------------------------------------

    def measure(self, *, compiled: bool | str = False) -> Any:
        """Run the step with the plan, and return what was promised beside what was found.

        A policy that is applied to the model, this plan or another, is left out meanwhile.

        Args:
            compiled: whether the model is compiled for that as a whole, by `torch.compile`; or by which of its backends. What
                this process has compiled before is then compiled again when it is called.

        Returns:
            A `Measurement`. `print` it.

        Raises:
            UsageError: the plan was loaded from a file, so that there is nothing to run: see `measure` in
                `reactivate.planner`; or its device is not here.
        """
        if self.runner is None:
            raise UsageError("This plan was loaded from a file and has no step to run. Plan again, to measure.")
        return self.runner.measure(self, compiled=compiled)

    @property
    def can_plan(self) -> bool:
        """Return whether it can still run the step that it was made for: not from a file."""
        return self.runner is not None

    def at(self, budget: int | str) -> Plan:
        """The plan for another budget, without another look at the model.

        Args:
            budget: as for `plan`.

        Raises:
            PlanInfeasible: there is none.
            UsageError: the plan was loaded from a file.
        """
        if self.runner is None:
            raise UsageError("This plan was loaded from a file and has no step to plan for. Plan again.")
        return self.runner.replan(parse(budget))

    # -- files --------------------------------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """All of it in dicts, lists, texts and numbers."""
        names = [item.name for item in dataclasses.fields(self) if item.metadata.get("json", True)]
        values = {name: getattr(self, name) for name in names}
        return {"version": VERSION, **{name: _plainly(value) for name, value in values.items()}}

    @classmethod
    def from_json(cls, value: Mapping[str, Any], storages: Storage | Iterable[Storage] | None = None) -> Plan:
        """Make a plan from what `to_json` returned.

        Args:
            value: that.
            storages: as for `plan`, in the place of those that it was made with.

        Raises:
            UsageError: it is not that, or of another version; or the storages are others than those of the plan.
        """
        if value.get("version") != VERSION:
            raise UsageError(f"A plan of version {value.get('version')!r}; this release reads {VERSION}. Plan again.")
        try:
            return cls._of(value, storages_in(storages))
        except (KeyError, TypeError, ValueError) as error:
            raise UsageError(f"This is no plan as `Plan.save` writes it: {error!r}.") from None

    @classmethod
    def _of(cls, value: Mapping[str, Any], given: Mapping[str, Storage]) -> Plan:
        uses = tuple(StorageUse(**item) for item in value.get("storages", ()))
        made_for = value["made_for"]
        inputs = tuple((name, tuple(shape), dtype) for name, shape, dtype in made_for["inputs"])
        return cls(
            budget=value["budget"],
            budget_bytes=value["budget_bytes"],
            made_for=Circumstances(**{**made_for, "inputs": inputs}),
            decisions=tuple(
                Decision(**{**item, "treatment": _treatment_of(item["treatment"])}) for item in value["decisions"]
            ),
            fixed=Fixed(**value["fixed"]),
            plain=_prediction_of(value["plain"]),
            predicted=_prediction_of(value["predicted"]),
            frontier=tuple(Point(**item) for item in value["frontier"]),
            policies=tuple(Point(**item) for item in value["policies"]),
            proof=Proof(**value["proof"]),
            optimizer_bytes=value["optimizer_bytes"],
            planning_seconds=value["planning_seconds"],
            largest=value["largest"],
            device_bytes=value.get("device_bytes", 0),
            storages=uses,
            offered=tuple(value.get("offered", ())),
            uncertainty=value.get("uncertainty", 0.0),
            live=live_of(uses, given),
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it to a file, as JSON."""
        Path(path).write_text(json.dumps(self.to_json(), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | os.PathLike[str], storages: Storage | Iterable[Storage] | None = None) -> Plan:
        """Read a plan that `save` wrote.

        Args:
            path: of the file.
            storages: as for `plan`, in the place of those that the plan was made with.

        Raises:
            UsageError: there is no such file, it is no plan, or of another version; or the storages are others than those
                of the plan.
        """
        try:
            value = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise UsageError(f"Plan.load: {os.fspath(path)!r} cannot be read as a plan: {error}.") from None
        if not isinstance(value, dict):
            raise UsageError(f"Plan.load: {os.fspath(path)!r} is no plan: it has a {type(value).__name__}.")
        return cls.from_json(value, storages)


def _again(value: Mapping[str, Any], live: Mapping[str, Storage]) -> Plan:
    return dataclasses.replace(Plan.from_json(value), live=live)


def _plainly(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        if isinstance(value, LiveBytes):
            return [value.seconds, value.kept, value.recomputed, value.workspace]
        if isinstance(value, Copy):
            return [value.begin_seconds, value.end_seconds, value.nbytes, value.is_back]
        return {item.name: _plainly(getattr(value, item.name)) for item in dataclasses.fields(value)}
    return [_plainly(item) for item in value] if isinstance(value, (tuple, list)) else value


def _treatment_of(value: Mapping[str, Any]) -> Treatment:
    recompute, modules, ops = (tuple(value[name]) for name in ("recompute", "save_modules", "save_ops"))
    saved = tuple(CallName(*call) for call in value.get("save_calls", ()))
    inputs, results, by_rows = value.get("inputs", ""), value.get("results", ""), value.get("by_rows", False)
    return Treatment(value["name"], recompute, modules, ops, inputs, results, saved, by_rows)


def _prediction_of(value: Mapping[str, Any]) -> Prediction:
    moments = tuple(LiveBytes(*item) for item in value["moments"])
    copies = tuple(Copy(*item) for item in value.get("copies", ()))
    alive = tuple(
        LiveTensors(**{**item, "shape": tuple(item["shape"]), "held_by": tuple(item["held_by"])})
        for item in value.get("alive", ())
    )
    return Prediction(**{**value, "moments": moments, "copies": copies, "alive": alive})

"""A plan: a policy that a solver wrote, with the prediction that it was chosen by."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from itertools import repeat
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel

from reactivate import storage as storages
from reactivate._modules.paths import THE_MODEL
from reactivate._modules.spans import span_at
from reactivate._region.accounts import in_words
from reactivate._text.saving import Saved, check_saved, no_such
from reactivate._text.words import described
from reactivate._types import Action, Site, Storage
from reactivate.errors import UsageError
from reactivate.planner.budget import parse
from reactivate.planner.candidates import Assignment, OfPlanner
from reactivate.planner.contents import Decision, PlanContents, StorageUse
from reactivate.planner.offload import storages_in
from reactivate.planner.runner import Measurement, StepRunner
from reactivate.planner.text import html, text
from reactivate.planner.units import bucket_bytes, find_units, module_class_name, parameter_digest
from reactivate.planner.watches import CallWatch
from reactivate.policies._base import Interest

VERSION = 1


@dataclass(frozen=True, repr=False)
class Plan(PlanContents, OfPlanner, Saved):
    """A policy that fits a step into a budget: give it to `apply`. Printed, it is a table; its figures are attributes.

    It has all attributes of `PlanContents`, and two more that a file has not.

    Attributes:
        runner: what can still run the step: `measure`, `at` and warnings about other shapes need it. A file has none.
        live: the storages themselves, by their names.
    """

    runner: StepRunner | None = field(default=None, compare=False)
    live: Mapping[str, Storage] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        if self.runner is not None:  # a file has what the runner said
            object.__setattr__(self, "device_bytes", self.runner.target.memory_bytes)

    # -- a policy -----------------------------------------------------------------------------------------------------

    @functools.cached_property
    def assignment(self) -> Assignment:
        """The policy itself."""
        return Assignment({decision.path: decision.candidate for decision in self.decisions}, self.live)

    def __call__(self, site: Site) -> Action | None:
        return self.assignment(site)

    def __repr__(self) -> str:
        counts = Counter(decision.candidate.name for decision in self.decisions)
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

    def _interest(self) -> Interest:
        return self.assignment._interest()

    def _inside(self, path: str) -> Any:
        return self.assignment._inside(path)

    def _spans(self) -> tuple[str, ...]:
        return self.assignment._spans()

    @property
    def _is_found(self) -> bool:
        return True

    def _applied_to(self, model: Module) -> Callable[[], None]:
        for use in self.storages:
            if use.name not in self.live:
                raise UsageError(
                    f"apply: this plan keeps tensors in {use.written}, a storage that no file can make again. Load the plan "
                    "with it: Plan.load(path, storage=[...])."
                )
        if isinstance(model, DistributedDataParallel) and self.made_for.model != module_class_name(model):
            raise UsageError(
                f"apply: this plan was made for {self.made_for.model}, which DistributedDataParallel has wrapped since. Its "
                f"buckets take {in_words(bucket_bytes(model))} that the plan does not count. Plan the wrapped model."
            )
        differences = list(_differences(model, self.made_for.units, self.decisions))
        if differences:
            raise UsageError(
                f"apply: this plan was made for {self.made_for.model}, and this model is another: "
                f"{'; '.join(differences[:3])}{'; ...' if len(differences) > 3 else ''}. Plan again, for this model."
            )
        if self.runner is not None:
            return self.runner.watch(model, self)
        watch = CallWatch(self, None, is_from_file=True)
        return model.register_forward_pre_hook(watch, with_kwargs=True).remove

    # -- its step -------------------------------------------------------------------------------------------------------

    def measure(self, *, compiled: bool | str = False) -> Measurement:
        """Run the step with the plan, and return what was predicted beside what was measured.

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
        return self.runner.measure(self, self.assignment, compiled=compiled)

    @property
    def can_plan(self) -> bool:
        """Return whether it can still run the step that it was made for: not from a file."""
        return self.runner is not None

    def at(self, budget: float | str) -> Plan:
        """The plan for another budget, without another look at the model.

        Args:
            budget: as for `plan`.

        Raises:
            PlanInfeasible: there is none.
            UsageError: the plan was loaded from a file.
        """
        if self.runner is None:
            raise UsageError("This plan was loaded from a file and has no step to plan for. Plan again.")
        found: Plan = self.runner.replan(parse(budget))
        return found

    # -- files --------------------------------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """All of it in dicts, lists, texts and numbers."""
        return {"version": VERSION, **{item.name: _plain(getattr(self, item.name)) for item in fields(PlanContents)}}

    @classmethod
    def from_json(cls, value: Mapping[str, Any], storage: Storage | Iterable[Storage] | None = None) -> Plan:
        """Make a plan from what `to_json` returned.

        Args:
            value: that.
            storage: as for `plan`, in the place of those that it was made with.

        Raises:
            UsageError: it is not that, or of another version; or the storages are others than those of the plan.
        """
        return cls._from(value, storage, "This")

    @classmethod
    def _from(cls, value: Mapping[str, Any], storage: Storage | Iterable[Storage] | None, what: str) -> Plan:
        """Make a plan from what `to_json` returned, which errors call `what`."""
        check_saved(value, "Plan", VERSION, what)
        given = storages_in(storage)
        try:
            contents = _fields_of(PlanContents, value)
            return cls(**contents, live=_live(contents.get("storages", ()), given))
        except UsageError:
            raise
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise no_such("Plan", error, what) from None

    @classmethod
    def load(cls, path: str | os.PathLike[str], storage: Storage | Iterable[Storage] | None = None) -> Plan:
        """Read a plan that `save` wrote.

        Args:
            path: of the file.
            storage: as for `plan`, in the place of those that the plan was made with.

        Raises:
            UsageError: there is no such file, it is no plan, or of another version; or the storages are others than those
                of the plan.
        """
        if not isinstance(path, (str, os.PathLike)):
            raise UsageError(f"Plan.load takes the path of a file that Plan.save wrote; got {described(path)}.")
        try:
            value = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise UsageError(f"Plan.load: {os.fspath(path)!r} cannot be read as a plan: {error}.") from None
        if not isinstance(value, dict):
            raise UsageError(f"Plan.load: {os.fspath(path)!r} is no plan: it has a {type(value).__name__}.")
        return cls._from(value, storage, f"The file {os.fspath(path)!r}")


def _again(value: Mapping[str, Any], live: Mapping[str, Storage]) -> Plan:
    return dataclasses.replace(Plan.from_json(value), live=live)


def _plain(value: Any) -> Any:
    """Return dataclasses as dicts, tuples as lists."""
    if is_dataclass(value):
        return {_key(item): _plain(getattr(value, item.name)) for item in fields(value)}
    return [_plain(item) for item in value] if isinstance(value, (tuple, list)) else value


def _key(item: dataclasses.Field[Any]) -> str:
    return str(item.metadata.get("key", item.name))


def _made(kind: Any, value: Any) -> Any:
    """Return what `_plain` made `value` of, by its type."""
    arguments = get_args(kind)
    if get_origin(kind) in (Union, UnionType):
        return None if value is None else _made(arguments[0], value)
    if get_origin(kind) is tuple:
        kinds = repeat(arguments[0]) if arguments[-1] is Ellipsis else arguments
        return tuple(map(_made, kinds, value))
    if is_dataclass(kind):
        return kind(**_fields_of(kind, value))  # type: ignore[operator]
    return kind(*map(_made, _hints(kind).values(), value)) if hasattr(kind, "_fields") else value


def _fields_of(kind: Any, value: Mapping[str, Any]) -> dict[str, Any]:
    needed = {item.name for item in fields(kind) if item.default is item.default_factory is dataclasses.MISSING}
    found = [(item.name, _key(item)) for item in fields(kind)]
    return {name: _made(_hints(kind)[name], value[key]) for name, key in found if key in value or name in needed}


_hints = functools.cache(get_type_hints)


# -- storages in files: those of `reactivate.storage` by their names and arguments, which make them again -------------

_PLAIN = (int, float, str, bool, type(None))


def storage_arguments(storage: Any) -> dict[str, Any] | None:
    """Return what makes a storage again; None where a file cannot say that.

    Examples:
        >>> from reactivate.planner.plan import storage_arguments
        >>> from reactivate.storage import Host
        >>> storage_arguments(Host(limit=2**30))["limit"]
        1073741824
    """
    kind = type(storage).__name__
    if kind not in storages.__all__ or getattr(storages, kind) is not type(storage) or not is_dataclass(storage):
        return None
    values = {item.name: getattr(storage, item.name) for item in fields(storage) if item.init}
    return {"kind": kind, **values} if all(isinstance(value, _PLAIN) for value in values.values()) else None


def _live(uses: Iterable[StorageUse], given: Mapping[str, Storage]) -> dict[str, Storage]:
    """Return the storages of a plan by their names: those that are given, else those that its file can make again."""
    known = {use.name: use.arguments for use in uses}
    for name, storage in given.items():
        if name not in known:
            raise UsageError(
                f"Plan.load(storage=...): this plan uses {', '.join(known) or 'no storage'}; got {storage!r}."
            )
    made = {name: _storage_of(values) for name, values in known.items() if values is not None and name not in given}
    return {**made, **given}


def _storage_of(arguments: Mapping[str, Any]) -> Storage:
    values = dict(arguments)
    kind = values.pop("kind", None)
    if not isinstance(kind, str) or kind not in storages.__all__:
        raise UsageError(f"A plan with a storage of the kind {kind!r}, which this release does not have.")
    return getattr(storages, kind)(**values)  # type: ignore[no-any-return]


# -- the model of a plan ----------------------------------------------------------------------------------------------


def _differences(model: Module, units: int, decisions: Sequence[Decision]) -> Iterator[str]:
    """Say what of a model is other than a plan knows it.

    Args:
        model: the model.
        units: how many units it had; 0 if unknown.
        decisions: of the plan.
    """
    found = len(find_units(model))
    if units and found != units:
        yield f"it has {found} blocks and other modules that contain modules, and the planned model had {units}"
    modules = dict(model.named_modules())
    for decision in decisions:
        # Not `or`: modules have lengths, and one of torch.compile's raises where it is asked for it.
        module = modules[decision.path] if decision.path in modules else span_at(model, decision.path)
        where = repr(decision.path or THE_MODEL)
        if module is None:
            yield f"it has no {where}"
        elif module_class_name(module) != decision.kind:
            yield f"{where} is a {module_class_name(module)} and was a {decision.kind}"
        elif parameter_digest(module) != decision.parameters:
            yield f"{where} has other parameters"

"""The treatments of units: the fixed ones, and those that save single calls by value."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch.nn import Module

from reactivate.planner.by_value.call_costs import CallCosts, RecordedCall, costs_of
from reactivate.planner.by_value.call_names import CallName
from reactivate.planner.by_value.ranking import best_choices
from reactivate.planner.profile.probe import TreatmentTable, class_of
from reactivate.planner.treatments import FULL, Treatment, treatments_of

Record = Callable[[Mapping[str, Collection[str]]], Mapping[str, Sequence[RecordedCall]]]


def menus_of(
    units: Mapping[str, Module], functions: Mapping[str, Collection[str]], table: TreatmentTable, record: Record
) -> dict[str, tuple[Treatment, ...]]:
    """Return the treatments of each unit. Equal units have the same: the calls of one of them are recorded.

    Args:
        units: that are called, by their paths.
        functions: that they call.
        table: has the plain step, and what it holds where every unit is recomputed.
        record: returns the calls of units, given the functions that these call.
    """
    firsts: dict[object, str] = {}
    for path, unit in units.items():
        firsts.setdefault(class_of(unit), path)
    fixed = {path: treatments_of(unit, frozenset(functions[path])) for path, unit in units.items()}
    calls = record({path: functions[path] for path in firsts.values()})
    added: dict[object, _Added] = {}
    for kind, path in firsts.items():
        change, count = table.change(path, FULL), table.plain.treated.count(path)
        keep_bytes = 0 if change is None else -change.held_bytes // count  # of one call, as `calls` are
        added[kind] = _Added.to(fixed[path], calls.get(path, ()), keep_bytes)
    return {path: added[class_of(unit)].beside(fixed[path]) for path, unit in units.items()}


@dataclass(frozen=True)
class _Added:
    """The treatments by value of equal units.

    Attributes:
        calls: of the units, in order.
        costs: of the treatments.
    """

    calls: Sequence[RecordedCall]
    costs: Mapping[Treatment, CallCosts]

    @classmethod
    def to(cls, fixed: Iterable[Treatment], calls: Sequence[RecordedCall], keep_bytes: int) -> _Added:
        """Find those that help the most beside fixed ones.

        Args:
            fixed: the fixed treatments.
            calls: of the unit.
            keep_bytes: what the unit holds where nothing is recomputed, above what it does where everything is.
        """
        others = [_saved_by(item, calls) for item in fixed if _saves_calls(item)]
        count = len({call.name for call in calls if not call.reason})
        choices = best_choices(calls, keep_bytes, others)
        names = [f"recompute but {len(choice.saved)} of {count} calls" for choice in choices]
        return cls(calls, {treatment_of(choice.saved, name): choice.costs for choice, name in zip(choices, names)})

    def beside(self, fixed: Iterable[Treatment]) -> tuple[Treatment, ...]:
        """Return these behind fixed ones, without those of them that are no smaller and no faster than one of these."""
        return (*(item for item in fixed if not (_saves_calls(item) and self._beats(item))), *self.costs)

    def _beats(self, item: Treatment) -> bool:
        costs = costs_of(self.calls, _saved_by(item, self.calls))
        return any(
            other.held_bytes <= costs.held_bytes and other.seconds <= costs.seconds
            for treatment, other in self.costs.items()
            if item.sees_functions or not treatment.sees_functions
        )


def _saves_calls(treatment: Treatment) -> bool:
    return treatment.recompute == ("",) and treatment.saves


def _saved_by(treatment: Treatment, calls: Sequence[RecordedCall]) -> frozenset[CallName]:
    return frozenset(
        call.name
        for call in calls
        if (call.name.op in treatment.save_ops if call.name.op else call.name.path in treatment.save_modules)
    )


def treatment_of(saved: Collection[CallName], name: str) -> Treatment:
    """Return the treatment that recomputes a unit but for these calls."""
    functions = tuple(sorted(call for call in saved if call.op))
    modules = tuple(sorted(call.path for call in saved if not call.op))
    return Treatment(name, ("",), modules, save_calls=functions)

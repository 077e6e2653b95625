"""The treatments of units: the fixed ones, and those that save single calls by value."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from torch.nn import Module

from reactivate.planner.by_value.call_costs import RecordedCall
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
    calls = record({path: functions[path] for path in firsts.values()})
    by_value: dict[object, tuple[Treatment, ...]] = {}
    for kind, path in firsts.items():
        fixed = treatments_of(units[path], frozenset(functions[path]))
        change = next(iter(table.changes(path, FULL)), None)  # of its first call
        by_value[kind] = () if change is None else treatments_by_value(calls.get(path, ()), -change.held_bytes, fixed)
    return {
        path: (*treatments_of(unit, frozenset(functions[path])), *by_value[class_of(unit)])
        for path, unit in units.items()
    }


def treatments_by_value(
    calls: Sequence[RecordedCall], keep_bytes: int, others: Sequence[Treatment]
) -> tuple[Treatment, ...]:
    """List the treatments that recompute a unit but for the calls that are worth the most for each byte.

    Args:
        calls: of the unit, in order.
        keep_bytes: what the unit holds where nothing is recomputed, above what it does where everything is.
        others: the treatments that it has anyway.
    """
    known = [frozenset(_saved_by(item, calls)) for item in others if item.recompute == ("",)]
    count = len({call.name for call in calls if not call.reason})
    return tuple(
        treatment_of(choice.saved, f"recompute but {len(choice.saved)} of {count} calls")
        for choice in best_choices(calls, keep_bytes, known)
    )


def _saved_by(treatment: Treatment, calls: Sequence[RecordedCall]) -> Iterator[CallName]:
    for call in calls:
        path, op, _ = call.name
        if op in treatment.save_ops if op else path in treatment.save_modules:
            yield call.name


def treatment_of(saved: Collection[CallName], name: str) -> Treatment:
    """Return the treatment that recomputes a unit but for these calls."""
    functions = tuple(sorted(call for call in saved if call.op))
    modules = tuple(sorted(call.path for call in saved if not call.op))
    return Treatment(name, ("",), modules, save_calls=functions)

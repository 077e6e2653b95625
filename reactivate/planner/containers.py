"""Containers: modules and spans around several units, which a plan may treat as one unit in the place of their members.

A container that is one region keeps one input for all of its members, and needs the memory of all of them at once when it is
recomputed; unless its members are regions inside of it, which are recomputed twice. What that comes to is read off simulated
steps, as for units: of one of those that are alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.nn import Module, ModuleDict, ModuleList

from reactivate._modules.paths import is_below
from reactivate._modules.spans import SpanPlace
from reactivate.planner.profile.probe import Reading, TreatmentTable, class_of
from reactivate.planner.profile.spans import span_of
from reactivate.planner.sequences import spans_in
from reactivate.planner.treatments import FULL, Treatment

Menus = Mapping[str, Sequence[Treatment]]


@dataclass(frozen=True)
class Container:
    """A module, or a span of a `Sequential`, around several units.

    Attributes:
        path, module: where it is, and itself.
        start, stop: the numbers of the first call of a unit in it, and of the one after the last.
        treatments: what may be done with it.
    """

    path: str
    module: Module
    start: int
    stop: int
    treatments: tuple[Treatment, ...]


def containers_in(model: Module, plain: Reading) -> tuple[Container, ...]:
    """List the modules and spans around several units, but not all, whose calls follow one another, each once in a step.

    Of several around the same units, the outermost.

    Args:
        model: the model.
        plain: the plain step.
    """
    found: dict[tuple[int, int], Container] = {}
    for path, module, start, stop in (*_modules_in(model, plain), *spans_in(model, plain)):
        if 1 < stop - start < len(plain.paths):
            below = path if SpanPlace.of(path) is None else path.rpartition("[")[0]
            members = tuple(member.removeprefix(below).lstrip(".") for member in plain.paths[start:stop])
            treatments = (FULL, Treatment("recompute, nested", ("", *members)))
            found.setdefault((start, stop), Container(path, module, start, stop, treatments))
    return tuple(found.values())


def _modules_in(model: Module, plain: Reading) -> Iterator[tuple[str, Module, int, int]]:
    """Yield the modules that are called, with units inside whose calls follow one another, and the numbers of these."""
    once = {path for path in plain.paths if plain.paths.count(path) == 1}
    for path, module in model.named_modules():
        calls = [index for index, unit in enumerate(plain.paths) if path and unit != path and is_below(unit, path)]
        if not calls or isinstance(module, (ModuleList, ModuleDict)):
            continue
        start, stop = calls[0], calls[-1] + 1
        members = plain.paths[start:stop]
        if len(members) == len(calls) and once.issuperset(members) and None not in plain.treated[start:stop]:
            yield path, module, start, stop


def with_containers(
    model: Module,
    menus: Menus,
    table: TreatmentTable,
    attempt: Callable[[Mapping[str, Treatment]], tuple[Any, Reading]],
) -> Menus:
    """Enter into a table what the containers of a model come to, and return their treatments with those of the units.

    A container that is not called, since somebody calls its members, comes to what the plain step does, and is left out.

    Args:
        model: the model.
        menus: the treatments of units, by path.
        table: the figures of these.
        attempt: simulates a step with treatments for some modules, by their paths.
    """
    containers = containers_in(model, table.plain)
    tried = _tried(containers, table.plain)
    for group in _apart(list(tried)):
        called = group
        for number in range(
            len(group[0].treatments)
        ):  # the first is the whole: where that makes no region, nothing does
            chosen = {item.path: item.treatments[number] for item in called}
            reading = attempt(chosen)[1] if chosen else table.plain
            called = [item for item in called if any(call.regions for call in reading.calls[item.start : item.stop])]
            if reading.paths == table.plain.paths:
                for item in called:
                    span = span_of(chosen[item.path].name, item.path, item.start, item.stop, reading, table.plain)
                    table.spans += [span.at(other.start, other.path) for other in tried[item]]
    return {**menus, **{item.path: item.treatments for item in containers}}


def _tried(containers: Sequence[Container], plain: Reading) -> dict[Container, list[Container]]:
    """Return those whose figures are read off steps, each with those that share them.

    Spans share them if they are made of equal modules that come to the same in the plain step. The one that is tried is apart
    from the others that are, where that can be, so that few steps do.
    """
    kinds: dict[object, list[Container]] = {}
    for item in containers:
        kinds.setdefault(_kind_of(item, plain), []).append(item)
    found: dict[Container, list[Container]] = {}
    for alike in kinds.values():
        tried = next((item for item in alike if all(_are_apart(item, other) for other in found)), alike[0])
        found[tried] = alike
    return found


def _kind_of(item: Container, plain: Reading) -> object:
    if SpanPlace.of(item.path) is None:  # its own forward may do anything
        return item
    figures = tuple((call.held_bytes, call.need_bytes) for call in plain.calls[item.start : item.stop])
    return class_of(item.module), tuple(map(type, item.module.modules())), figures


def _apart(containers: Sequence[Container]) -> list[list[Container]]:
    """Return groups of containers that can be tried in one step: between two of them lies a call that is kept."""
    groups: list[list[Container]] = []
    for container in containers:
        group = next((group for group in groups if all(_are_apart(container, other) for other in group)), None)
        if group is None:
            groups.append([container])
        else:
            group.append(container)
    return groups


def _are_apart(one: Container, other: Container) -> bool:
    return one.stop < other.start or other.stop < one.start

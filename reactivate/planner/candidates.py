"""The candidates of a unit: keep all of it, recompute all or parts of it, save some calls of what is recomputed."""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from torch import nn
from torch.nn import Module

from reactivate._modules.paths import is_below
from reactivate._modules.spans import SpanPlace
from reactivate._types import DEVICE, Action, CompilerBudget, LossByRows, Recompute, Save, Site, Storage
from reactivate.planner.units import find_parts
from reactivate.policies._base import Interest, ReadyMade, written
from reactivate.policies.ops import COMPUTE_INTENSIVE

_PRODUCTS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_COVERED = frozenset({"linear", "conv1d", "conv2d", "conv3d"})  # ops that these modules are
_ATTENTION = "scaled_dot_product_attention"
MOST_PARTS = 4  # of a unit that are also tried one by one


class CallName(NamedTuple):
    """A call inside of a unit.

    Attributes:
        path: below the unit: the module that is called, or the one in which a function is called.
        op: the function, by the name that `save_ops` takes; "" for the call of the module.
        number: of the call among those of the function in that module.
    """

    path: str
    op: str = ""
    number: int = 0


def is_torchs_leaf(module: Module) -> bool:
    """Return whether a module is one of torch's own without modules inside: its call is looked at as a whole."""
    return type(module).__module__.startswith("torch.nn.modules.") and not any(True for _ in module.children())


def name_of_function_call(site: Site, unit: str) -> CallName:
    """Return the name of a function's call, and count it: ask once for each call.

    Args:
        unit: the path of the unit.
    """
    path = site.path[len(unit) :].removeprefix(".")
    key = ("planned", site.path, site.op)
    number = site.counts.get(key, 0)
    site.counts[key] = number + 1
    return CallName(path, site.op or "", number)


@dataclass(frozen=True)
class Candidate:
    """A candidate of a unit.

    Attributes:
        name: what reports call it.
        recompute: paths below the unit (of a span, below its `Sequential`), "" for the unit itself: these are regions.
        save_modules: paths below the unit: recomputations skip these modules.
        save_ops: recomputations skip these ops.
        save_calls: recomputations skip these calls of functions.
        inputs: the name of the storage in which the inputs of the regions are kept; "" for where they are.
        results: the name of the storage in which the saved calls are kept.
        by_rows: whether the loss of what it returns is computed by rows.
        compiler_share: what torch's compiler keeps of the unit, as a part of what it would keep.
    """

    name: str
    recompute: tuple[str, ...] = ()
    save_modules: tuple[str, ...] = ()
    save_ops: tuple[str, ...] = ()
    inputs: str = ""
    results: str = ""
    save_calls: tuple[CallName, ...] = ()
    by_rows: bool = False
    compiler_share: float = 1.0

    @property
    def storage(self) -> str:
        """Return the name of the storage that it uses; "" for none."""
        return self.inputs or self.results

    @property
    def saves(self) -> bool:
        """Return whether recomputations skip anything."""
        return bool(self.save_modules or self.save_ops or self.save_calls)

    @property
    def sees_functions(self) -> bool:
        """Return whether the engine has to look at functions."""
        return bool(self.save_ops or self.save_calls)

    def regions(self, unit: str) -> frozenset[str]:
        """Return the paths of its regions, as a candidate of a unit."""
        return frozenset(join(unit, part) for part in self.recompute)

    @property
    def seen_ops(self) -> frozenset[str]:
        """Return the ops that it has a say in."""
        return frozenset((*self.save_ops, *(call.op for call in self.save_calls)))


KEEP = Candidate("keep")
FULL = Candidate("recompute", ("",))
BY_ROWS = Candidate("loss by rows", by_rows=True)
SHARES = tuple(
    Candidate(f"compiler keeps {100 * share:.0f} %", compiler_share=share) for share in (0.75, 0.5, 0.25, 0.0)
)


def list_candidates(unit: Module, ops: frozenset[str]) -> tuple[Candidate, ...]:
    """List the candidates that are worth a try, `KEEP` first.

    Args:
        ops: the ops that run in it, by the names that `save_ops` takes.
    """
    parts = tuple(find_parts(unit))
    found = [KEEP, FULL]
    if parts:
        found.append(Candidate("nested recompute", ("", *parts)))
    if 1 < len(parts) <= MOST_PARTS:
        found += [Candidate(f"recompute {part}", (part,)) for part in parts]
    if parts:
        found.append(Candidate(f"recompute {' and '.join(parts)}" if len(parts) <= 2 else "recompute all parts", parts))
    return (*found, *_saving(unit, ops))


def moving(candidates: Iterable[Candidate], storage: str) -> tuple[Candidate, ...]:
    """List the candidates that are these, with what they keep in a storage: inputs of regions, saved calls, or both."""
    found = []
    for item in candidates:
        if "" in item.recompute or len(item.recompute) > 1:  # a single part has an input that is kept around it anyway
            found.append(replace(item, name=f"{item.name}, inputs to {storage}", inputs=storage))
            if item.saves:
                found.append(replace(item, name=f"{item.name}, saved to {storage}", results=storage))
                found.append(replace(item, name=f"{item.name}, all to {storage}", inputs=storage, results=storage))
    return tuple(found)


def without_refused(candidates: Mapping[str, Candidate], refused: Collection[str]) -> dict[str, Candidate]:
    """Return the candidates of units, by path, that have no refused region."""
    return {path: item for path, item in candidates.items() if item.regions(path).isdisjoint(refused)}


def _saving(unit: Module, ops: frozenset[str]) -> list[Candidate]:
    """The unit is recomputed, some of its calls are saved: those that compute much for each byte of their results."""
    work = {path: _work_of(module) for path, module in unit.named_modules() if isinstance(module, _PRODUCTS)}
    products = tuple(work)
    long = tuple(path for path, size in work.items() if size > min(work.values()))
    attention = tuple({_ATTENTION} & ops)
    others = tuple(sorted(ops.intersection(COMPUTE_INTENSIVE) - {_ATTENTION} - (_COVERED if products else frozenset())))
    levels = {
        "attention": ((), attention),
        "long products": (long, ()),
        "long products and attention": (long, attention) if attention else ((), ()),
        "products": (products, others),
        "products and attention": (products, (*attention, *others)) if attention else ((), ()),
    }
    return [
        Candidate(f"recompute but {name}", ("",), modules, functions)
        for name, (modules, functions) in levels.items()
        if modules or functions
    ]


def _work_of(module: Module) -> int:
    """Return the number of products that go into a number of the result."""
    if isinstance(module, nn.Linear):
        return module.in_features
    assert isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d))
    return module.in_channels // module.groups * math.prod(module.kernel_size)


# -- as a policy ------------------------------------------------------------------------------------------------------


class OfPlanner(ReadyMade):
    """A policy of the planner: in its trials and measurements no checksums take memory and time."""

    def _default_check(self) -> Literal["metadata"]:
        return "metadata"

    @property
    def _may_match_nothing(self) -> bool:
        return True


@dataclass(frozen=True, repr=False)
class Assignment(OfPlanner):
    """A candidate for each unit, as a policy. Units that are not named are kept.

    Args:
        candidates: by the paths of units.
        storages: by the names by which candidates know them.
    """

    candidates: Mapping[str, Candidate]
    storages: Mapping[str, Storage] = field(default_factory=dict)

    def __post_init__(self) -> None:
        regions = {region: unit for unit, item in self.candidates.items() for region in item.regions(unit)}
        saved = {join(unit, part): unit for unit, item in self.candidates.items() for part in item.save_modules}
        heads = frozenset(path for path, item in self.candidates.items() if item.by_rows)
        shares = {path: item.compiler_share for path, item in self.candidates.items() if item.compiler_share < 1}
        object.__setattr__(self, "_shares", shares)
        object.__setattr__(self, "_heads", heads)
        object.__setattr__(self, "_regions", regions)
        object.__setattr__(self, "_saved", saved)

    def __hash__(self) -> int:
        return hash(tuple(self.candidates.items()))

    def __repr__(self) -> str:
        return written("Assignment", dict(self.candidates))

    def __call__(self, site: Site) -> Action | None:
        if site.module is not None:
            regions, saved = self._regions, self._saved  # type: ignore[attr-defined]
            if site.path in regions:
                return Recompute(self._named(self.candidates[regions[site.path]].inputs))
            if site.path in self._heads:  # type: ignore[attr-defined]
                return LossByRows()
            if site.path in self._shares:  # type: ignore[attr-defined]
                return CompilerBudget(self._shares[site.path])  # type: ignore[attr-defined]
            return Save(self._named(self.candidates[saved[site.path]].results)) if site.path in saved else None
        unit = next(
            (path for path, item in self.candidates.items() if not item.by_rows and is_below(site.path, path)), None
        )
        return None if unit is None else self._of_unit(unit)(site)

    @property
    def regions(self) -> Collection[str]:
        """Return the paths of its regions."""
        return self._regions.keys()  # type: ignore[attr-defined,no-any-return]

    def _named(self, storage: str) -> Storage:
        return self.storages[storage] if storage else DEVICE

    def _interest(self) -> Interest:
        ops = frozenset(op for item in self.candidates.values() for op in item.seen_ops)
        return Interest(ops, modules=bool(self._saved), paths=bool(ops))  # type: ignore[attr-defined]

    def _inside(self, path: str) -> ReadyMade:
        unit = self._regions.get(path)  # type: ignore[attr-defined]
        return self if unit is None else self._of_unit(unit)

    def _of_unit(self, unit: str) -> _InsideUnit:
        candidate = self.candidates[unit]
        return _InsideUnit(unit, candidate, self._named(candidate.results))

    def _spans(self) -> tuple[str, ...]:
        return tuple(path for path in self.candidates if SpanPlace.of(path) is not None)


@dataclass(frozen=True, repr=False)
class _InsideUnit(OfPlanner):
    """The policy inside of one unit: regions with nothing to save have no policy to ask."""

    unit: str
    candidate: Candidate
    storage: Storage

    def __repr__(self) -> str:
        return f"{self.candidate.name} at {self.unit!r}"

    def __call__(self, site: Site) -> Action | None:
        if site.module is not None:
            saved = {join(self.unit, part) for part in self.candidate.save_modules}
            return Save(self.storage) if site.path in saved else None
        if site.op in self.candidate.save_ops:
            return Save(self.storage)
        calls = self.candidate.save_calls
        return Save(self.storage) if calls and name_of_function_call(site, self.unit) in calls else None

    def _kept_in(self, path: str) -> Hashable:
        return self.candidate

    def _interest(self) -> Interest:
        candidate = self.candidate
        return Interest(candidate.seen_ops, modules=bool(candidate.save_modules), paths=bool(candidate.save_calls))


def join(path: str, below: str) -> str:
    """Return a path below another; of a span, below the `Sequential`.

    Examples:
        >>> from reactivate.planner.candidates import join
        >>> join("layers.1", "mlp"), join("layers[0:2]", "1.mlp"), join("layers[0:2]", ""), join("[0:2]", "1")
        ('layers.1.mlp', 'layers.1.mlp', 'layers[0:2]', '1')
    """
    place = SpanPlace.of(path) if below else None
    if place is not None:
        return join(place.path, below)
    return f"{path}.{below}" if path and below else path or below

"""The treatments of a unit: keep all of it, recompute all or parts of it, save some calls of what is recomputed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn
from torch.nn import Module

from reactivate._types import Action, Recompute, Save, Site
from reactivate.planner.units import parts_of
from reactivate.policies._base import Interest, ReadyMade, written
from reactivate.policies.ops import COMPUTE_INTENSIVE

_PRODUCTS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_COVERED = frozenset({"linear", "conv1d", "conv2d", "conv3d"})  # ops that these modules are
_ATTENTION = "scaled_dot_product_attention"
MOST_PARTS = 4  # of a unit that are also tried one by one


@dataclass(frozen=True)
class Treatment:
    """A treatment of a unit.

    Attributes:
        name: what reports call it.
        recompute: paths below the unit, "" for the unit itself: these modules are regions.
        save_modules: paths below the unit: recomputations skip these modules.
        save_ops: recomputations skip these ops.
    """

    name: str
    recompute: tuple[str, ...] = ()
    save_modules: tuple[str, ...] = ()
    save_ops: tuple[str, ...] = ()


KEEP = Treatment("keep")
FULL = Treatment("recompute", ("",))


def treatments_of(unit: Module, ops: frozenset[str]) -> tuple[Treatment, ...]:
    """List the treatments that are worth a try, `KEEP` first.

    Args:
        unit: the unit.
        ops: the ops that run in it, by the names that `save_ops` takes.
    """
    parts = tuple(parts_of(unit))
    found = [KEEP, FULL]
    if parts:
        found.append(Treatment("recompute, nested", ("", *parts)))
    if 1 < len(parts) <= MOST_PARTS:
        found += [Treatment(f"recompute {part}", (part,)) for part in parts]
    if parts:
        found.append(Treatment(f"recompute {' and '.join(parts)}" if len(parts) <= 2 else "recompute all parts", parts))
    return (*found, *_saving(unit, ops))


def _saving(unit: Module, ops: frozenset[str]) -> list[Treatment]:
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
        Treatment(f"recompute but {name}", ("",), modules, functions)
        for name, (modules, functions) in levels.items()
        if modules or functions
    ]


def _work_of(module: Module) -> int:
    """Return the number of products that go into a number of the result."""
    if isinstance(module, nn.Linear):
        return module.in_features
    assert isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d))
    return module.in_channels // module.groups * math.prod(module.kernel_size)


@dataclass(frozen=True, repr=False)
class Assignment(ReadyMade):
    """A treatment for each unit, as a policy. Units that are not named are kept.

    Args:
        treatments: by the paths of units.
    """

    treatments: Mapping[str, Treatment]

    def __post_init__(self) -> None:
        regions = {join(unit, part): unit for unit, item in self.treatments.items() for part in item.recompute}
        saved = {join(unit, part) for unit, item in self.treatments.items() for part in item.save_modules}
        object.__setattr__(self, "_regions", regions)
        object.__setattr__(self, "_saved", saved)

    def __hash__(self) -> int:
        return hash(tuple(self.treatments.items()))

    def __repr__(self) -> str:
        return written("Assignment", dict(self.treatments))

    def __call__(self, site: Site) -> Action | None:
        if site.module is not None:
            regions, saved = self._regions, self._saved  # type: ignore[attr-defined]
            return Recompute() if site.path in regions else Save() if site.path in saved else None
        unit = next((path for path in self.treatments if is_below(site.path, path)), None)
        return Save() if unit is not None and site.op in self.treatments[unit].save_ops else None

    def interest(self) -> Interest:
        ops = frozenset(op for item in self.treatments.values() for op in item.save_ops)
        return Interest(ops, modules=bool(self._saved), paths=bool(ops))  # type: ignore[attr-defined]

    def inside(self, path: str) -> ReadyMade:
        unit = self._regions.get(path)  # type: ignore[attr-defined]
        return self if unit is None else _InsideUnit(unit, self.treatments[unit])

    @property
    def may_match_nothing(self) -> bool:
        return True


@dataclass(frozen=True, repr=False)
class _InsideUnit(ReadyMade):
    """The policy inside of one unit: regions with nothing to save have no policy to ask."""

    unit: str
    treatment: Treatment

    def __repr__(self) -> str:
        return f"{self.treatment.name} at {self.unit!r}"

    def __call__(self, site: Site) -> Action | None:
        if site.module is not None:
            saved = {join(self.unit, part) for part in self.treatment.save_modules}
            return Save() if site.path in saved else None
        return Save() if site.op in self.treatment.save_ops else None

    def interest(self) -> Interest:
        return Interest(frozenset(self.treatment.save_ops), modules=bool(self.treatment.save_modules))

    @property
    def may_match_nothing(self) -> bool:
        return True


def join(path: str, below: str) -> str:
    """A path below another."""
    return f"{path}.{below}" if path and below else path or below


def is_below(path: str, above: str) -> bool:
    """Return whether a module is, or is inside of, another."""
    return not above or path == above or path.startswith(f"{above}.")

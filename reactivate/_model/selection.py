"""A policy's choice among the modules of a model: regions, saved modules, and what is kept beside them, with the reason."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch.nn import Module

from reactivate._model.forwards import BudgetForward, HeadForward, RegionForward, SavedForward, SpansForward
from reactivate._model.handle import AppliedForward
from reactivate._model.span_selection import by_sequential, spans_named
from reactivate._modules.blocks import blocks_of, siblings_of
from reactivate._modules.paths import THE_MODEL
from reactivate._modules.spans import SpanPlace
from reactivate._types import DEVICE, Action, CompilerBudget, LossByRows, Policy, Recompute, Save, Site
from reactivate.errors import UsageError
from reactivate.policies._base import ReadyMade, answer_of, interest_of, parts_of, shortened
from reactivate.policies._select import did_you_mean
from reactivate.policies._unmatched import Unmatched


class Selection:
    """The modules of a model that a policy has an action for.

    Args:
        unmatched: the parts of the policy, of which those that match a module are crossed off.

    Attributes:
        regions: {path: module} of those that are recomputed.
        spans: {path of a `Sequential`: the spans of its members that are recomputed, each as one}.
        inputs: {path: storage} of the regions whose inputs go to one.
        forwards: of each chosen module the class of what is to stand in for its `forward`, the path, the module, and what
            that class takes beside these. A module may be there twice: the spans in it first, then the module around them.

    Raises:
        UsageError: a part of the policy is for another model, or matches nothing.
    """

    def __init__(self, model: Module, policy: Policy, unmatched: Unmatched) -> None:
        self._model = model
        self._policy = policy
        self._spans = spans_named(policy, dict(model.named_modules()))
        self._sites = _sites_of(model, self._spans)
        blocks = [site.path for _, site in self._sites if site.block is not None]
        for part in parts_of(policy):
            if isinstance(part, ReadyMade):
                part._check_blocks(blocks)
        actions = [(site.path, module, self._action(site)) for module, site in self._sites]

        def those(kind: type[Action]) -> list[tuple[str, Module, Any]]:
            return [item for item in actions if isinstance(item[2], kind)]

        recomputed = {path: module for path, module, _ in those(Recompute)}
        places = {str(place): place for place in self._spans}
        self.regions = {path: module for path, module in recomputed.items() if path not in places}
        self.spans = by_sequential(place for path, place in places.items() if path in recomputed)
        self.inputs = {path: action.inputs for path, _, action in those(Recompute) if action.inputs is not DEVICE}
        self._inside = {id(inner) for module in recomputed.values() for inner in module.modules()}
        self.forwards: list[tuple[type[AppliedForward], str, Module, tuple[Any, ...]]] = [
            *((SpansForward, path, self._at(path), (row,)) for path, row in self.spans.items()),
            *((RegionForward, path, module, ()) for path, module in self.regions.items()),
            *((SavedForward, path, module, ()) for path, module, _ in those(Save) if id(module) in self._inside),
            *(
                (HeadForward, path, module, ())
                for path, module, _ in those(LossByRows)
                if id(module) not in self._inside
            ),
            *((BudgetForward, path, module, (action.share,)) for path, module, action in those(CompilerBudget)),
        ]
        self._cross_off(unmatched)
        self._refuse_unmatched(unmatched)

    def _action(self, site: Site) -> Action | None:
        action = answer_of(self._policy, site)
        if action is None and interest_of(self._policy).calls:  # it may be another call that is saved
            action = next((found for found in self._of_parts(site) if isinstance(found, Save)), None)
        return action

    def _of_parts(self, site: Site) -> Iterable[Action | None]:
        return (part(site) for part in parts_of(self._policy) if isinstance(part, ReadyMade))

    def _cross_off(self, unmatched: Unmatched) -> None:
        taken = {path for kind, path, *_ in self.forwards if kind not in (SpansForward, RegionForward)}
        for _, site in self._sites:
            for part in list(unmatched.parts):
                action = part(site)
                if isinstance(action, Recompute) or (action is not None and site.path in taken):
                    unmatched.parts.remove(part)

    def _refuse_unmatched(self, unmatched: Unmatched) -> None:
        """Rule 17: what selects modules must have selected some."""
        about_modules = [part for part in unmatched.parts if not _is_about_functions(part)]
        if about_modules:
            blocks = ", ".join(site.path for _, site in self._sites if site.block is not None)
            if not any(site.path for _, site in self._sites):
                kind = type(self._model).__name__
                raise UsageError(
                    f"apply: {about_modules[0]} matches nothing in {kind}, which has no modules inside. Make it one region: "
                    "reactivate.checkpoint(model)."
                )
            none = "It has no blocks: name modules with recompute_modules, or make it one region, checkpoint(model)"
            its_blocks = f"Its blocks are {blocks}" if blocks else none
            self._refuse_saved_outside(about_modules[0])
            has_regions = self._inside or not interest_of(about_modules[0]).modules
            where = "" if has_regions else " (and no module is recomputed, inside of which something could be saved)"
            paths = [site.path for _, site in self._sites if site.path]
            raise UsageError(
                f"apply: {about_modules[0]} matches nothing in {type(self._model).__name__}{where}."
                f"{did_you_mean(about_modules[0]._patterns(), paths)} {its_blocks}. Its modules are "
                f"{shortened(paths)}."
            )
        if unmatched.parts and not self._inside:
            raise UsageError(
                f"apply: {unmatched.parts[0]} saves calls inside of regions, and the policy makes no region. "
                "Combine it with one that does: first_match(save_ops(...), full())."
            )

    def _refuse_saved_outside(self, part: Any) -> None:
        """Refuse a part that saves modules, none of which is inside of a region."""
        matched = [site.path or THE_MODEL for _, site in self._sites if isinstance(part(site), Save)]
        if not matched:
            return
        spans = (str(place) for row in self.spans.values() for place in row)
        regions = shortened([*self.regions, *spans]) or "none, no module is recomputed"
        raise UsageError(
            f"apply: {part} matches {shortened(matched)} in {type(self._model).__name__}, and none of these is inside of a "
            f"region (the regions: {regions}). Modules are saved inside of regions, and outside of them all is kept anyway. "
            'Name modules inside of regions, such as "layers.*.mlp". To keep whole blocks and recompute the others, write '
            "exclude(full(), recompute_modules(...))."
        )

    def _at(self, path: str) -> Module:
        return next(module for module, site in self._sites if site.path == path)

    def _recomputed(self) -> Iterator[tuple[str, Module]]:
        """Yield the regions, and the members of spans that are regions, with their paths."""
        yield from self.regions.items()
        inside = {id(member) for row in self.spans.values() for place in row for member in self._spans[place]}
        yield from ((site.path, module) for module, site in self._sites if id(module) in inside)

    def kept_beside(self) -> dict[str, str]:
        """Return {path: reason} of the layers with parameters that share a list with a block that is a region."""
        blocks = {id(module) for module, site in self._sites if site.block is not None}
        lists = {path.rpartition(".")[0]: path for path, module in self._recomputed() if id(module) in blocks}
        budgets = {path for kind, path, *_ in self.forwards if kind is BudgetForward}
        kept: dict[str, str] = {}
        for path in lists.values():
            for place, sibling in siblings_of(self._model, path).items():
                is_around = any(id(inner) in self._inside for inner in sibling.modules())
                if place not in budgets and not is_around and any(True for _ in sibling.parameters()):
                    kept[place] = _reason(sibling, id(sibling) in blocks)
        return kept


def _sites_of(model: Module, spans: Mapping[SpanPlace, Module]) -> list[tuple[Module, Site]]:
    """Every module and every span, with its site. They share what policies count."""
    blocks = {id(module): number for number, module in enumerate(blocks_of(model).values())}
    counts: dict[Any, int] = {}
    return [
        (module, Site(path, module=module, block=blocks.get(id(module)), blocks=len(blocks), counts=counts))
        for path, module in (*model.named_modules(), *((str(place), span) for place, span in spans.items()))
    ]


def _is_about_functions(part: Any) -> bool:
    interest = interest_of(part)
    return interest.any_function or bool(interest.functions) or interest.names


def _reason(module: Module, is_block: bool) -> str:
    if is_block:
        return "the policy does not select them"
    if any(True for _ in module.children()):
        return "not among the repeated layers; add recompute_modules(...) for them"
    return "single layers without modules inside, of which recomputation would drop little"

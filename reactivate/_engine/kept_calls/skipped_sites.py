"""A recomputation's side of saved calls: they are skipped, and their results handed back."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from sys import _getframe
from typing import Any

import torch
from torch import Tensor

from reactivate._engine.barriers.aliases import seen_by_aliases
from reactivate._engine.kept_calls.choice import CallDecision, Choice
from reactivate._engine.kept_calls.kept import Kept, SavedSite
from reactivate._engine.kept_calls.saved_functions import mark
from reactivate._engine.kept_calls.site_log import Log, objects_in, scalars_in, tensors_in, unseen
from reactivate._engine.mismatch.oplog import OpLog
from reactivate._engine.mismatch.refusals import is_of_a_write
from reactivate._engine.sites import user_frame_inside
from reactivate._torch.autograd import give_back
from reactivate._torch.modes import is_function_mode_active


class RecomputationLog(Log):
    """The saved calls of a recomputation: they are skipped."""

    def __init__(
        self, record: Any, choice: Choice, sites: Sequence[SavedSite], matching: Any, behind: Any = None
    ) -> None:
        super().__init__(record, choice)
        self._behind = behind
        self._todo = iter(sites)
        self._next = next(self._todo, None)
        self._matching = matching
        self._contexts = ExitStack()
        self._is_lost = False
        self.skipped: list[SavedSite] = []  # custom functions, until `apply` has been told of their results

    def close(self) -> None:
        super().close()
        self._contexts.close()

    @property
    def values(self) -> OpLog | None:
        return self._matching.log  # type: ignore[no-any-return]

    def call(self, decision: CallDecision, fn: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        number, site = self.number, self._next
        self.number += 1
        if site is None or site.number != number or self._is_lost or self._matching.is_complete:
            return fn(*args, **kwargs)
        if site.label != decision.label or not _is_here(site):
            if site.start != site.stop:
                raise self._matching.refuse_site(site, decision.label)
            site = self._later(site, decision.label)
            if site is None:
                return fn(*args, **kwargs)
        self._next = next(self._todo, None)
        if self.values is not None:
            return self.unlogged(self._skip)(site, fn, args, kwargs)
        return self._skip(site, fn, args, kwargs)

    def _later(self, site: SavedSite, label: str) -> SavedSite | None:
        """Return the saved call that this one is, where recomputation omits calls before it that saved nothing.

        A cache was filled in the forward: it has their results. If this call is none of the saved ones, the numbers do not
        tell any more which calls are: all that follow run again.
        """
        found: SavedSite | None = site
        while found is not None and (found.label != label or not _is_here(found)):
            found = next(self._todo, None) if found.start == found.stop else None
        if found is None:
            self._is_lost = True
        else:
            self.number = found.number + 1
        return found

    def call_function(self, decision: CallDecision, forward: Callable[..., Any], args: Any, is_split: bool) -> Any:
        skipped = len(self.skipped)
        run = functools.partial(self._run_function, forward, args, is_split)
        result = self.call(decision, run, args if is_split else args[1:], {})
        if len(self.skipped) > skipped and not is_split:
            mark(args[0], result, self.skipped.pop())
        return result

    def _run_function(self, forward: Callable[..., Any], args: Any, is_split: bool, *_: Any) -> Any:
        return self.run_function(forward, args, is_split)

    def set_up_function(self, setup: Callable[..., Any], context: Any, inputs: Any, output: Any) -> Any:
        if self.skipped:
            return mark(context, output, self.skipped.pop())
        return super().set_up_function(setup, context, inputs, output)

    def _skip(self, site: SavedSite, fn: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        if site.reason is None:
            is_seen = is_function_mode_active()
            arguments = unseen(self._fill, site, args, kwargs) if is_seen else self._fill(site, args, kwargs)
            results = None if site.outputs is None else self._load(site, site.outputs)
            if results is not None:
                if self._behind is not None:
                    results = self._behind.fenced(results)
                if site.is_function:
                    self.skipped.append(site)
                if site.changes:
                    with seen_by_aliases():
                        self._change(site)
                if is_seen:
                    return unseen(_hand_back, site, results, arguments, args, kwargs)
                return _hand_back(site, results, arguments, args, kwargs)
        return self.run_again(fn, args, kwargs)

    def _load(self, site: SavedSite, outputs: Sequence[Any]) -> list[Any] | None:
        """Load what the call returned; None if somebody has written to it since the region ended, so that it runs again."""
        try:
            if not any(isinstance(item, Kept) and item.is_overwritten for item in outputs):
                # To load may recompute a region around this one.
                return [item.load() if isinstance(item, Kept) else item for item in outputs]
        except RuntimeError as error:
            if not is_of_a_write(error):
                raise
        self._matching.go_back_to(site)
        return None

    def _fill(self, site: SavedSite, args: Any, kwargs: dict[str, Any]) -> list[Tensor]:
        arguments = tensors_in(args, kwargs)
        self._matching.skip(site, arguments)
        if site.scalars is not None and site.scalars != scalars_in(args, kwargs):
            raise self._matching.refuse_scalars(site)
        return arguments

    def _change(self, site: SavedSite) -> None:
        for change in site.changes:
            context = change()
            if context is not None:
                self._contexts.enter_context(context)


def _is_here(site: SavedSite) -> bool:
    """Return whether the code that is running is that which made the saved call, as far as both are inside of the region."""
    frame, is_inside = user_frame_inside(_getframe(2))  # the first frames are ours
    return not (is_inside and site.is_placed) or (frame.f_code, frame.f_lasti) == site.place


def _hand_back(
    site: SavedSite, results: Iterable[Any], arguments: Sequence[Tensor], args: Any, kwargs: dict[str, Any]
) -> Any:
    """Return what the call returned: tensors with a place in a graph where they had one, so that what follows saves."""
    leaves: list[Any] = []
    for item, requires in zip(results, site.requires):
        if isinstance(item, Tensor):
            tensor = item.detach()
            leaves.append(give_back(tensor) if requires and torch.is_grad_enabled() else tensor)
        else:
            leaves.append(arguments[item.number])
    if site.contents is None:
        return leaves[0]
    return site.contents.make(leaves, objects_in(args, kwargs) if site.contents.has_given else ())

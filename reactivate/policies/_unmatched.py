"""The parts of a policy that match no call: told when all regions have run once, as a later step may make such a call."""

from __future__ import annotations

from reactivate._text.warnings import warn
from reactivate._types import Policy, Site
from reactivate.errors import UsageError
from reactivate.policies._base import Interest, ReadyMade, interest_of, parts_of
from reactivate.policies._select import did_you_mean


class Unmatched:
    """The parts of a policy that have matched nothing so far.

    Args:
        asked_by: what messages call the function that was given the policy.
        has_modules: whether its regions are modules, or methods of modules.

    Attributes:
        regions: how many regions the policy is for.
    """

    def __init__(self, policy: Policy, asked_by: str, has_modules: bool = True) -> None:
        self.asked_by = asked_by
        self.has_modules = has_modules
        self.regions = 1
        self._ran: set[str] = set()
        self.parts = [part for part in parts_of(policy) if isinstance(part, ReadyMade) and not part._may_match_nothing]
        self.seen: set[str] = set()
        self._paths: set[str] = set()

    def look_at(self, site: Site) -> None:
        """Cross off what matches `site`."""
        self.seen.add(repr(site.name) if site.name else site.op or site.path)
        self._paths.add(site.path)
        if self.parts:
            self.parts = [part for part in self.parts if part(site) is None]

    def region_has_run(self, path: str) -> None:
        """Once all have, every part must have matched something, but calls: a model that skips layers may make them later.

        Raises:
            UsageError: a part selects modules, and there are none of these.
        """
        is_all = path in self._ran or len(self._ran) + 1 >= self.regions
        self._ran.add(path)
        if not is_all:
            return
        parts, self.parts = self.parts, []
        for part in parts:
            interest = interest_of(part)
            if interest == Interest():  # it says what is recomputed, and that is
                continue
            if not self.has_modules and (interest.modules or interest.paths):
                raise UsageError(
                    f"{self.asked_by}: {part} selects modules, and the region is a function, which has none. Checkpoint the "
                    "module itself, reactivate.checkpoint(module, policy=...), or use reactivate.apply(model, policy)."
                )
            nothing = "none with a name; reactivate.site(function, name=...) gives a call a name"
            seen = ", ".join(sorted(self.seen)) or (nothing if interest.names else "none")
            meant = did_you_mean(part._patterns(), self._paths)
            if interest.modules:
                raise UsageError(f"{self.asked_by}: {part} matches nothing.{meant} Calls seen: {seen}.")
            warn(
                f"{self.asked_by}: {part} matches nothing so far, and so saves nothing.{meant} Calls seen: {seen}. "
                "Ignore this if the model makes such calls in some steps only."
            )

"""The end of a forward pass for its saved calls: which of them recomputations make again, and what is kept of the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from reactivate._engine.kept_calls.choice import Choice
from reactivate._engine.kept_calls.kept import SavedSite, kept_among, last_needed
from reactivate._engine.kept_calls.site_log import Log
from reactivate._engine.record import Saved


class SettledLog(Log):
    """A log of saved calls that can be settled.

    Attributes:
        sites: the calls, in order.
    """

    def __init__(self, record: Any, choice: Choice) -> None:
        super().__init__(record, choice)
        self.sites: list[SavedSite] = []
        self._must_rerun: str | None = None
        self._hooks: dict[int, Any] = {}  # of nodes that saved calls made, which have it

    def finish_pending(self) -> None:
        """Take down the call whose node does not exist yet, if there is one."""
        raise NotImplementedError

    def rerun_all(self, reason: str) -> None:
        """Let recomputations make every saved call again."""
        self.finish_pending()
        self._must_rerun = reason
        for site in self.sites:
            site.reason = site.reason or reason
            self._let_go(site)

    def distrust(self, reason: str) -> None:
        """Let recomputations make every saved call again, although what it keeps is right: perhaps its arguments are not.

        What is kept stays, since a region around this one has seen it.
        """
        self.finish_pending()
        for site in self.sites:
            site.reason = site.reason or reason

    def _let_go(self, site: SavedSite) -> None:
        """Keep nothing of a call that is recomputed."""
        site.outputs, site.changes = None, ()
        for reference, *_ in self.record.saved[site.start : site.stop]:
            slot: Any = reference()
            if slot is not None:
                slot.kept = slot.recipe = None

    def settle(self) -> None:
        """The forward pass is over: keep what is to be kept."""
        self.finish_pending()
        self._hooks.clear()  # which the graph has
        for site in self.sites:
            bits, site.bits = site.bits, None
            is_written = any(item.is_written() for item in kept_among(site.outputs or ()))
            if is_written or (bits is not None and site.reason is None and bits.written()):
                site.reason = "its result is written to afterwards"
                self._let_go(site)
        saved: Sequence[Saved] = self.record.saved
        last = last_needed(saved, self.sites) if self.record.early_stop else len(saved)
        for site in self.sites:
            name = f"what {site.label} keeps"
            if last < site.stop:
                site.outputs = None
            if site.outputs is not None:
                for item in kept_among(site.outputs):
                    item.settle(name)
            for index in range(site.start, site.stop):
                slot: Any = saved[index][0]()
                if slot is not None and slot.kept is not None:
                    slot.kept.settle(name)
        if self.choice.unmatched.parts:
            self.choice.unmatched.region_has_run(self.choice.region)

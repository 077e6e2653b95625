"""The regions of a step that cannot be recomputed: what they are given is written to, and no copy of it is there."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from reactivate._passes.observing import observed_by
from reactivate._region.naming import name_of as name_of_region
from reactivate._region.region import Region


class RefusedRegions:
    """Observes which regions of a step cannot be recomputed.

    Attributes:
        paths: of these regions.
    """

    def __init__(self) -> None:
        self.paths: set[str] = set()
        self._running: list[str] = []  # the recomputations that run, the innermost last

    def forward_done(self, region: Region) -> None:
        """A region's forward pass is over."""
        if region.replaced:  # what proves that the write does not matter takes memory that no plan counts
            self.paths.add(name_of_region(region))

    def recomputation_begins(self, region: Region) -> None:
        """A region is recomputed."""
        self._running.append(name_of_region(region))

    def recomputation_done(self, region: Region) -> None:
        """A region was recomputed."""
        self._running.pop()

    def end(self) -> None:
        """The step is over: the innermost recomputation that has not come to its end was refused."""
        self.paths.update(self._running[-1:])


def refused_in(run: Callable[[], object]) -> set[str]:
    """Run a step, and return the paths of the regions that cannot be recomputed in it.

    It is run for nothing else. So a step that ends in an error tells what was seen up to there.
    """
    found = RefusedRegions()
    with suppress(Exception), observed_by(found):
        run()
    found.end()
    return found.paths

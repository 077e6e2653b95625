"""Places of a step in a model: the module that runs, and the line of the user's code."""

from __future__ import annotations

from collections.abc import Iterable
from traceback import walk_stack
from types import CodeType, FrameType

from torch.nn import Module

from reactivate._modules.spans import SequentialSpan, SpanPlace
from reactivate._modules.view import original_of
from reactivate._passes.places import CodeLocation, line_of, modules_around, user_frame
from reactivate._region.region import Region
from reactivate._snapshot.kinds import module_of_method

SourcePlace = tuple[str, "str | None"]  # module path, source line


class SourcePlaces:
    """Finds places in the stack.

    Args:
        roots: the models whose modules have paths.
        around: the code that called all this, which is no place of the user's.
    """

    def __init__(self, roots: Iterable[Module], around: set[CodeType]) -> None:
        self._paths = {id(original_of(module)): path for root in roots for path, module in root.named_modules()}
        self._around = around

    def at(self, frame: FrameType | None) -> SourcePlace:
        """Return the module that runs, and the line of the user's."""
        paths = (self._paths.get(id(module)) for module in modules_around(frame))
        path = next((path for path in paths if path is not None), "")
        found = None if frame is None else user_frame(frame)
        return path, None if found is None else self.line((found.f_code, found.f_lasti))

    def of_region(self, region: Region, frame: FrameType) -> SourcePlace:
        """Return the place of a region whose forward ends in `frame`."""
        path, line = self.at(frame)
        module = module_of(region)
        if isinstance(module, SequentialSpan):
            place = SpanPlace.of(region.options.name or "")
            return path if place is None else str(place._replace(path=path)), line
        return self._paths.get(id(module), path), line

    def line(self, site: CodeLocation) -> str | None:
        """Return the line of a site; None in the code around."""
        return None if site[0] in self._around else line_of(site)


def codes_around(frame: FrameType) -> set[CodeType]:
    """Return the code of a frame, and of those that called it."""
    return {each.f_code for each, _ in walk_stack(frame)}


def module_of(region: Region) -> Module | None:
    """The module that is the region, if it is one."""
    return module_of_method(region.fn)

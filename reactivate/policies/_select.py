"""Policies for modules that are selected by path, by class, by predicate."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch.nn import Module

from reactivate._modules.spans import SpanPlace
from reactivate._text.words import described, nearest
from reactivate._types import DEVICE, Action, Recompute, Save, Site, Storage
from reactivate.errors import UsageError
from reactivate.policies._base import Interest, ReadyMade, written

_INDEX = re.compile(r"\[(\w+)\]")  # as Python writes a child of a list
_SLICE = re.compile(r"\[[^\]]*:[^\]]*\]")

Selector = str | type | Callable[[Site], bool]


@dataclass(frozen=True, repr=False)
class SelectedModules(ReadyMade):
    """A policy that has one action for the modules that it selects.

    Attributes:
        function: the name of the function that made it.
        selectors: which modules.
        action: what to do with these.
    """

    function: str
    selectors: tuple[Selector, ...]
    action: Action

    def __repr__(self) -> str:
        inputs = self.action.inputs if isinstance(self.action, Recompute) else None
        return written(self.function, *self.selectors, inputs=inputs, storage=self.storage)

    def __call__(self, site: Site) -> Action | None:
        return self.action if site.module is not None and selects(self.selectors, site) else None

    @property
    def storage(self) -> Storage:
        """Return where it keeps what it saves."""
        return self.action.storage if isinstance(self.action, Save) else DEVICE

    def _patterns(self) -> tuple[str, ...]:
        return tuple(selector for selector in self.selectors if isinstance(selector, str))

    def _spans(self) -> tuple[str, ...]:
        is_recomputed = isinstance(self.action, Recompute)
        return tuple(pattern for pattern in self._patterns() if is_recomputed and SpanPlace.of(pattern) is not None)

    def _interest(self) -> Interest:
        return Interest(modules=isinstance(self.action, Save))


def check(selectors: tuple[Selector, ...], asked_by: str, *, takes_spans: bool = False) -> None:
    """See to it that each of `selectors` is one.

    Args:
        asked_by: the function that was given them.
        takes_spans: whether they may be spans of a `Sequential`.

    Raises:
        UsageError: one is not.
    """
    for selector in selectors:
        is_class = isinstance(selector, type) and issubclass(selector, Module)
        is_predicate = callable(selector) and not isinstance(selector, (type, Module))
        if not (is_class or (isinstance(selector, str) and selector) or is_predicate):
            is_module = isinstance(selector, Module)
            remedy = " Pass its path: the name that it has in model.named_modules()." if is_module else ""
            raise UsageError(
                f"{asked_by} selects modules by the end of their path ('*.attn'), by class, or by a function of the "
                f"site; {described(selector)} is none of these.{remedy}"
            )
        if isinstance(selector, str) and _SLICE.search(selector):
            _check_span(selector, asked_by, takes_spans)


def _check_span(selector: str, asked_by: str, takes_spans: bool) -> None:
    if not takes_spans:
        raise UsageError(
            f"{asked_by}: {selector!r} is a span of a Sequential, and only recompute_modules takes spans. Name the members: "
            f"{_SLICE.sub('.*', selector)!r}."
        )
    place = SpanPlace.of(selector)
    if place is None or not place.start < place.stop:
        raise UsageError(
            f"{asked_by}: {selector!r} is no span. Write the path of a Sequential, the number of the first member from 0 on, "
            "and that of the one after the last, both written out: 'layers[8:16]'."
        )


def selects(selectors: tuple[Selector, ...], site: Site) -> bool:
    """Return whether one of `selectors` is for the module of `site`, or the module that its function is called in."""
    for selector in selectors:
        if isinstance(selector, str):
            if matches(selector, site.path):
                return True
        elif isinstance(selector, type):
            if isinstance(site.module, selector):
                return True
        elif selector(site):
            return True
    return False


def matches(pattern: str, path: str) -> bool:
    """Return whether `path` ends as `pattern` says: `*` stands for one name, `**` for any number of them."""
    return _compiled(pattern).search(f"{path}.") is not None


def meant(pattern: str, paths: Iterable[str]) -> str | None:
    """Return a pattern like `pattern`, of which no path is one, that one of `paths` is; None if there is no such pattern.

    Names that there are take the place of misspelled ones, and names in front that there are not are left out.

    Examples:
        >>> from reactivate.policies._select import meant
        >>> paths = ["layers", "layers.0", "layers.0.self_attn"]
        >>> meant("layer.*.attn", paths), meant("*.self_atn", paths), meant("model.layers[0]", paths)
        (None, '*.self_attn', 'layers.0')
    """
    known = list(paths)
    if any(matches(pattern, path) for path in known):
        return None
    names = {name for path in known for name in path.split(".")}
    written = _INDEX.sub(r".\1", pattern).strip().split(".")
    likely = [name if name in names or "*" in name else next(iter(nearest(name, names)), name) for name in written]
    for start in range(len(likely)):
        found = ".".join(likely[start:])
        if found.strip("*.") and any(matches(found, path) for path in known):
            return found
    return None


def did_you_mean(patterns: Iterable[str], paths: Iterable[str]) -> str:
    """Return what may have been meant by patterns that no path is one of, as a question behind a space; or nothing."""
    known = list(paths)
    close = [found for pattern in patterns if (found := meant(pattern, known)) is not None]
    return f" Did you mean {' or '.join(map(repr, close))}?" if close else ""


@functools.cache
def _compiled(pattern: str) -> re.Pattern[str]:
    names = []
    for name in pattern.split("."):
        if name == "**":
            names.append("(?:[^.]+\\.)*")
        else:
            names.append(re.escape(name).replace("\\*", "[^.]*").replace("\\?", "[^.]") + "\\.")
    return re.compile("(?:^|(?<=\\.))" + "".join(names) + "$")

"""Plans, explanations, comparisons: what can be read, printed, and written to files."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from reactivate._text.table import Table
from reactivate._text.words import described
from reactivate.errors import UsageError


def check_saved(value: Any, kind: str, version: int, what: str = "This") -> None:
    """See to it that `value` is what `to_json` of a plan and the like returned.

    Args:
        value: anything.
        kind: the class, as users call it.
        version: of what this release writes.
        what: the value in words.

    Raises:
        UsageError: it is something else, or of another version.
    """
    if not isinstance(value, Mapping):
        remedy = " Read text with json.loads first." if isinstance(value, (str, bytes)) else ""
        raise UsageError(
            f"{kind}.from_json takes what {kind}.to_json returned, a dict; got {described(value)}.{remedy}"
        )
    if "version" not in value:
        raise no_such(kind, KeyError("version"), what)
    if value["version"] != version:
        raise UsageError(
            f"{what} is of version {value['version']!r}; this release reads version {version} of the class {kind}. Make it "
            "again."
        )


def no_such(kind: str, error: Exception, what: str = "This") -> UsageError:
    """Return the error about a value, in words `what`, from which no object of the class `kind` could be made."""
    reason = f"the field {error.args[0]!r} is missing" if isinstance(error, KeyError) else repr(error)
    return UsageError(f"{what} is no {kind.lower()} as `{kind}.save` writes it: {reason}.")


class Saved:
    """Something that can be written to a file."""

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write this to a file, in the form that its suffix says.

        Args:
            path: `.json`, all of it, to be loaded again; `.txt`, the table; `.html`, a page that needs nothing else; of a
                plan also `.png` or `.svg`, its pictures.

        Raises:
            UsageError: there is no such form, or what draws it is not installed.
        """
        # What draws is an extra, and is imported where something is drawn.
        import_module("reactivate.report").write(self, Path(path))


class Tabled(Saved):
    """Something that is printed, and shown in a notebook, as a table."""

    def table(self) -> Table:
        """The table."""
        raise NotImplementedError

    def text(self, *, width: int | None = None, plain: bool = False) -> str:
        """The table as text.

        Args:
            width: in characters; that of the terminal if None, 120 where there is none.
            plain: without rich, as wide as it gets; so it is where rich is not installed.
        """
        return self.table().text(width=width, plain=plain)

    def __str__(self) -> str:
        return self.text()

    def _repr_html_(self) -> str:
        return self.table().html()

"""Plans, explanations, comparisons: what can be read, printed, and written to files."""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path

from reactivate._text.table import Table


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

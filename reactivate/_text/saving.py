"""Files of what can be read: plans, explanations, comparisons."""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path


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

"""A hook of mkdocs: the tab "Developers" is not in the index of the search, and tables have no link to their file."""

import re
from typing import Any

TABLE = re.compile(r"^\[Table: .+\]\(\.\./benchmarks/.+\)\n", re.MULTILINE)
"""A link for readers on GitHub, which does not include the table behind it."""


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Remove the links to tables, and set `search: exclude: true` for developers, as front matter would."""
    if any(section.title == "Developers" for section in page.ancestors):
        page.meta["search"] = {"exclude": True}
    return TABLE.sub("", markdown)

"""A hook of mkdocs: pages in the tab "Developers" are not in the index of the search."""

from typing import Any


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Set `search: exclude: true`, as front matter would."""
    if any(section.title == "Developers" for section in page.ancestors):
        page.meta["search"] = {"exclude": True}
    return markdown

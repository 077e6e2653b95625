"""The tutorial as a notebook: a cell for each block of Python, and what stands between them.

python tests/notebook.py > docs/tutorial.ipynb
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parent.parent / "docs" / "tutorial.md"
BLOCK = re.compile(r"^```python\n(.*?)^```\n", re.DOTALL | re.MULTILINE)


def notebook() -> str:
    """Return the notebook's JSON."""
    parts = BLOCK.split(PAGE.read_text(encoding="utf-8"))
    cells = [
        _cell(text.strip(), is_code=index % 2 == 1, index=index) for index, text in enumerate(parts) if text.strip()
    ]
    facts = {"language_info": {"name": "python"}}
    return json.dumps(
        {"cells": cells, "metadata": facts, "nbformat": 4, "nbformat_minor": 5}, indent=1, ensure_ascii=False
    )


def _cell(text: str, *, is_code: bool, index: int) -> dict[str, Any]:
    cell: dict[str, Any] = {"cell_type": "code" if is_code else "markdown", "id": f"cell-{index}", "metadata": {}}
    if is_code:
        cell |= {"execution_count": None, "outputs": []}
    return {**cell, "source": text.splitlines(keepends=True)}


if __name__ == "__main__":
    print(notebook())

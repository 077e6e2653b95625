"""docs/limits.md: each entry has a test that shows it, in one of the files `test_limits_of_*.py`."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

from limit_cases import shown

for path in sorted(Path(__file__).parent.glob("test_limits_of_*.py")):
    importlib.import_module(path.stem)

ENTRIES = re.findall(r"^### (.+)$", (Path(__file__).parents[2] / "docs/limits.md").read_text(), re.MULTILINE)


def test_each_entry_is_shown() -> None:
    assert sorted(shown) == sorted(ENTRIES)

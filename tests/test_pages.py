"""The README and every page of the docs: their Python runs from top to bottom, as it stands."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from notebook import notebook

import reactivate

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
ALL = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
PAGES = [page for page in ALL if BLOCK.search(page.read_text("utf-8"))]


def needed_by(code: str) -> set[str]:
    """The packages that a block imports and that are not installed."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module or "")
    return {name for name in (name.partition(".")[0] for name in names) if importlib.util.find_spec(name) is None}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_python_of_a_page_runs(page: Path, tmp_path: Path) -> None:
    """One program a page. A block is left out if it imports what is not installed here: Megatron, torch_xla."""
    blocks = BLOCK.findall(page.read_text("utf-8"))
    program = tmp_path / "page.py"
    program.write_text("\n\n".join(block for block in blocks if not needed_by(block)), encoding="utf-8")
    paths = os.pathsep.join(filter(None, (str(Path(reactivate.__file__).parents[1]), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, str(program)],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": paths},
    )
    assert done.returncode == 0, done.stderr


def test_the_notebook_is_the_tutorial() -> None:
    """Its code runs as that of the page does, above."""
    found = (ROOT / "docs" / "tutorial.ipynb").read_text("utf-8")
    assert found == notebook() + "\n", "write it again: python tests/notebook.py > docs/tutorial.ipynb"
    code = ["".join(cell["source"]) for cell in json.loads(found)["cells"] if cell["cell_type"] == "code"]
    assert code == [block.strip() for block in BLOCK.findall((ROOT / "docs" / "tutorial.md").read_text("utf-8"))]


def test_pages_have_their_code_in_blocks_that_run() -> None:
    """No other spelling of the fence hides a block from the test above."""
    for page in ALL:
        fences = re.findall(r"^```(\w+)", page.read_text("utf-8"), re.MULTILINE)
        assert set(fences) <= {"python", "sh", "yaml", "toml", "json", "text"}, page.name

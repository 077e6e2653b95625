"""The README and every page of the docs: their Python runs from top to bottom, as it stands."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from forked import Forks
from notebook import notebook

import reactivate
from reactivate import Plan

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
PRINTING = re.compile(r"^```python\n((?:(?!```)[^\n]*\n)*)```\s*^```text\n(.*?)^```$", re.DOTALL | re.MULTILINE)
"""A block, without the blocks before it, and right behind it what it prints."""
END = "-- the end of a block"
ALL = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
LAUNCHER = re.compile(r"^torchrun (.+) train\.py$", re.MULTILINE)  # a page that says so runs on several processes
SEARCH = re.compile(r"\bplan\(|torch\.compile\(")
REFERENCE = "\n".join(page.read_text("utf-8") for page in sorted((ROOT / "docs").glob("reference*.md")))
ALWAYS_HERE = {"reactivate", "torch", *sys.stdlib_module_names}


def packages_of(code: str) -> frozenset[str]:
    """The optional packages that a block imports."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module or "")
    return frozenset(name.partition(".")[0] for name in names) - ALWAYS_HERE


def blocks_of(page: Path) -> list[tuple[str, frozenset[str]]]:
    """The Python blocks of a page, each with the optional packages that it imports."""
    return [(block, packages_of(block)) for block in BLOCK.findall(page.read_text("utf-8"))]


def programs_of(page: Path) -> Iterator[Any]:
    """The program of a page, if it has one. It is slow if it imports more than torch, or runs on several processes.

    So are those that plan or compile, but for the page that everybody reads first.
    """
    text = page.read_text("utf-8")
    blocks = [block for block, packages in blocks_of(page) if all(map(importlib.util.find_spec, packages))]
    takes_long = LAUNCHER.search(text) or (SEARCH.search(text) and page.name != "README.md")
    if blocks:
        marks = [pytest.mark.slow] if takes_long or any(map(packages_of, blocks)) else []
        yield pytest.param(page, blocks, id=page.name, marks=marks)


PROGRAMS = [program for page in ALL for program in programs_of(page)]


@pytest.mark.parametrize(("page", "blocks"), PROGRAMS)
def test_the_python_of_a_page_runs_and_prints_what_it_shows(
    page: Path, blocks: list[str], tmp_path: Path, forks: Forks
) -> None:
    """All blocks are one program, but for those that import packages which are not installed."""
    program = tmp_path / "train.py"
    printed = tmp_path / "printed.txt"
    prints = f"import sys\nsys.stdout = open({str(printed)!r}, 'w', buffering=1)\n"
    ends = [f"{block}\nprint({END!r})\n" for block in blocks]
    program.write_text("\n\n".join([prints, *ends]), encoding="utf-8")
    launcher = LAUNCHER.search(page.read_text("utf-8"))
    done = launched(program, launcher[1]) if launcher else forks.run(program)
    assert done.returncode == 0, done.stderr
    shown = dict(PRINTING.findall(page.read_text("utf-8")))
    unshown = "" if page.name == "README.md" else "..."
    for block, text in zip(blocks, printed.read_text().replace(f"{program.parent}/", "").split(f"{END}\n")):
        is_right = shows(shown.get(block, unshown), text)
        assert is_right, f"{page.name} does not show what this prints:\n{block}\n{text}"


def shows(shown: str, text: str) -> bool:
    """Return whether a page shows a text: all of it, but for what ... stands for."""
    parts = map(str.strip, without_numbers(shown).split("..."))
    return re.fullmatch(".*".join(map(re.escape, parts)), without_numbers(text), re.DOTALL) is not None


def without_numbers(text: str) -> str:
    """Return text with a # for each number, and a space for spaces and rules: these differ from run to run."""
    text = re.sub(r"#[0-9a-f]{16}|[+-]?\d([\d.,]*\d)?", "#", text)
    return re.sub(r"[\s\u2500-\u257f]+", " ", text).strip()


@pytest.mark.parametrize(
    ("shown", "is_right"),
    [
        ("a 1 b\n...\nd 5", True),
        ("a 17 b c ...", True),
        ("a 17 b c d -1.5", True),
        ("a 17 b c", False),
        ("b ...", False),
        ("d ... a", False),
        ("a b ...", False),
        ("a 1 c ...", False),
        ("", False),
    ],
)
def test_what_is_shown_is_compared_but_for_numbers(shown: str, is_right: bool) -> None:
    assert shows(shown, "a  2 b\nc\nd 3\n") is is_right


def test_what_a_block_prints_stands_right_behind_it() -> None:
    page = "```python\na\n```\n\n```python\nb\n```\n\n```text\nc\n```\n"
    assert PRINTING.findall(page) == [("b\n", "c\n")]


def launched(program: Path, options: str) -> subprocess.CompletedProcess[str]:
    """Run a program on several processes."""
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": paths, "PYTHONFAULTHANDLER": "1"}
    if sys.platform == "linux":
        environment["GLOO_SOCKET_IFNAME"] = "lo"
    command = [sys.executable, "-m", "torch.distributed.run", *shlex.split(options), str(program)]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=program.parent, env=environment)


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


def test_the_reference_lists_the_package_and_the_figures_of_a_plan() -> None:
    names = [name for name in reactivate.__all__ if name not in ("integrations", "dropin")]
    assert not [name for name in names if f"::: reactivate.{name}\n" not in REFERENCE + "\n"]
    shown = [Plan, *(base for base in Plan.__mro__ if f"::: {base.__module__}.{base.__name__}\n" in REFERENCE)]
    described = "\n".join(str(vars(kind)["__doc__"]) for kind in shown)
    missing = [item.name for item in fields(Plan) if f"\n        {item.name}: " not in described]
    assert not missing, f"docs/reference.md does not say what {missing} of a plan are"


def test_each_page_is_in_the_navigation_once() -> None:
    listed = re.findall(r": ([a-z0-9-]+\.md)$", (ROOT / "mkdocs.yml").read_text("utf-8"), re.MULTILINE)
    assert sorted(listed) == sorted(page.name for page in (ROOT / "docs").glob("*.md"))


@pytest.mark.parametrize(("link", "is_right"), [("b.md#there", True), ("c.md", False), ("b.md#nowhere", False)])
def test_make_docs_fails_on_a_broken_link(link: str, is_right: bool, tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    recipe = re.search(r"^docs:.*\n\t(.*)$", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    validation = re.search(r"^validation:\n(?:  .*\n)+", (ROOT / "mkdocs.yml").read_text("utf-8"), re.MULTILINE)
    assert recipe is not None and validation is not None
    (tmp_path / "mkdocs.yml").write_text(f"site_name: two pages\n{validation[0]}")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text(f"[a link]({link})\n")
    (tmp_path / "docs" / "b.md").write_text("# There\n")
    command = recipe[1].replace("$(BIN)/mkdocs", f"{shlex.quote(sys.executable)} -m mkdocs")
    done = subprocess.run(command, shell=True, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode == 0) is is_right, done.stderr


@pytest.mark.parametrize("room", ["guards", "policies", "storage"])
def test_the_reference_lists_what_a_room_offers(room: str) -> None:
    missing = [name for name in getattr(reactivate, room).__all__ if not re.search(rf"\b{name}\b", REFERENCE)]
    assert not missing, f"docs/reference*.md do not list {missing} of reactivate.{room}"

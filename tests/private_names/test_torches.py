"""The torches and Pythons that are tested: what is pinned for each, what is downloaded, and what the table counts."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement
from several import each

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import torches

TESTS = """
import pytest
def test_passes(): pass
@pytest.mark.skip(reason="no | GPU")
def test_is_skipped(): pass
def test_fails(): {body}
"""


ROOT = Path(__file__).parents[2]


@each("python", ["3.10", "3.11", "3.12", "3.13"])
def test_each_python_has_one_pin_of_each_package(python: str) -> None:
    """Not all of them have the same last release for all Pythons."""
    lines = [line.split(" #")[0] for line in (ROOT / "constraints.txt").read_text("utf-8").splitlines()]
    pins = [Requirement(line) for line in lines if not line.startswith("#")]
    here = Counter(pin.name for pin in pins if pin.marker is None or pin.marker.evaluate({"python_version": python}))
    assert here == Counter({pin.name for pin in pins}) and len(here) > 5
    assert all(re.fullmatch(r"==[0-9.]+", str(pin.specifier)) for pin in pins)


def test_make_newest_says_what_it_downloads(tmp_path: Path) -> None:
    if shutil.which("make") is None:
        pytest.skip("there is no make")
    command = ["make", "--dry-run", "newest", f"XDG_CACHE_HOME={tmp_path}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    said, installed = done.stdout.index("Downloads about 3.2 GB: torch 2"), done.stdout.index("pip install")
    assert said < installed and str(tmp_path) in done.stdout


def measured(folder: Path, body: str, *more: str) -> int | str | None:
    (folder / "test_some.py").write_text(TESTS.format(body=body), encoding="utf-8")
    alone = ["-p", "no:cacheprovider", "-c", str(folder / "none.ini"), "--rootdir", str(folder)]
    (folder / "none.ini").write_text("[pytest]\n", encoding="utf-8")
    option = 'def pytest_addoption(parser):\n    parser.addoption("--wide", action="store_true")\n'
    (folder / "conftest.py").write_text(option, encoding="utf-8")
    with pytest.raises(SystemExit) as ended:
        out, page = str(folder / "torches.json"), str(folder / "torches.md")
        where = [] if more else [str(folder)]
        torches.main([sys.executable, *more, "--jobs", "0", "--out", out, "--page", page, "--", *alone, *where])
    return ended.value.code


@pytest.mark.slow
def test_a_row_says_what_became_of_the_tests_and_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    version = torch.__version__.partition("+")[0]
    assert measured(tmp_path, "assert 0") == 1
    (row,) = json.loads((tmp_path / "torches.json").read_text())
    assert (row["torch"], row["passed"], row["failed"]) == (version, 1, ["test_some::test_fails"])
    assert row["skipped"] == {"no | GPU": 1}
    page = (tmp_path / "torches.md").read_text()
    assert f"| {version} | {row['python']} | all tests | 1 | 1 | 1 |" in page and "test_some::test_fails" in page
    assert r"no \| GPU" in page

    assert measured(tmp_path, "pass", "--failed") == 0
    (again,) = json.loads((tmp_path / "torches.json").read_text())
    assert (again["passed"], again["failed"], again["skipped"]) == (2, [], row["skipped"])

    assert measured(tmp_path, "pass") == 0
    (row,) = json.loads((tmp_path / "torches.json").read_text())
    assert (row["passed"], row["failed"]) == (2, []) and "Failed" not in (tmp_path / "torches.md").read_text()

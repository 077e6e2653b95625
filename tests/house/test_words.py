"""Words: how docstrings open, and one word for one thing (docs/glossary.md)."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CODE = sorted(
    path
    for room in ("reactivate", "fuzz", "examples", "benchmarks", "tests", "tests_xla")
    for path in (ROOT / room).rglob("*.py")
)
PROSE = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])

# An opening without a verb or a noun leaves the reader to guess which of them it stands for.
OPENING = re.compile(r"(What|Whether|The same|Where|How|Those|It)\b")
OTHER_WORDS = {
    "replay": "recompute",
    "made again": "recomputed",
    "makes again": "recomputes",
}  # {another word for a thing that has one: that one}
OF_TORCHS = re.compile(r"graph\.replay\(\)|_set_view_replay_enabled")  # a method of CUDA graphs, a function


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(node)
            if text:
                yield getattr(node, "lineno", 1), text


def test_docstrings_open_with_a_verb_or_a_noun() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {text}"
        for path in CODE
        for line, text in docstrings(path)
        if OPENING.match(text)
    ]
    assert not found, "\n".join(found)
    assert sum(1 for path in CODE for _ in docstrings(path)) > 2_000


def test_examples_are_sections_that_the_reference_shows_as_code() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}" for path in CODE for line, text in docstrings(path) if "\nExample:" in text
    ]
    assert not found, "write `Examples:` in " + ", ".join(found)


def test_sentences_say_who_or_what_is_meant() -> None:
    """Code, autograd, a process, a user: not somebody."""
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in (*(path for path in CODE if path.is_relative_to(ROOT / "reactivate")), *PROSE)
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if re.search(r"\b(any|no|some)body\b|\bwhoever\b", line, re.IGNORECASE)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("word", OTHER_WORDS)
def test_one_word_for_one_thing(word: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in (*CODE, *PROSE)
        if path != Path(__file__)
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if re.search(word, OF_TORCHS.sub("", line), re.IGNORECASE)
    ]
    assert not found, f"it is called {OTHER_WORDS[word]} here:\n" + "\n".join(found)

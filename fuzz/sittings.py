"""A campaign over several sittings: its counts are in a file, and go on there as long as the engine is the same."""

from __future__ import annotations

import ast
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import torch

import reactivate
from fuzz.report import Summary

LEG = 2_000
"""Programs from one record to the next."""
_NOT_RUN = {"cli", "dropin", "integrations", "planner", "recipe", "report"}
"""Rooms of the package that no program comes into."""


@dataclass
class Record:
    """The counts of a campaign so far.

    Attributes:
        engine: what `digest_of_engine` was.
        torch: the version.
        first: the seed of the first program; the others follow.
        summary: the counts.
    """

    engine: str
    torch: str
    first: int
    summary: Summary

    @property
    def next(self) -> int:
        """Return the seed to go on with."""
        return self.first + self.summary.programs

    def save(self, path: Path) -> None:
        """Write the record, in the place of an earlier one."""
        values = {"engine": self.engine, "torch": self.torch, "first": self.first, **self.summary.to_json()}
        beside = path.with_suffix(".new")
        beside.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
        beside.replace(path)


def load(path: Path, first: int | None) -> Record:
    """Return the record in a file, or a new one: of the first sitting, of another engine, or from another seed.

    Args:
        path: the file.
        first: the seed of the first program; None takes that of the record.
    """
    engine, version = digest_of_engine(), torch.__version__.partition("+")[0]
    if path.exists():
        values = json.loads(path.read_text(encoding="utf-8"))
        same = (values["engine"], values["torch"]) == (engine, version)
        if same and first in (None, values["first"]):
            return Record(engine, version, values["first"], Summary.from_json(values))
    return Record(engine, version, 1 if first is None else first, Summary())


def digest_of_engine() -> str:
    """Return a digest of the code that programs run and of the fuzzer's.

    Comments, docstrings, layout and imports are of no account, nor is the file in which a function or a class stands.
    """
    rooms = [Path(reactivate.__file__).parent, Path(__file__).parent]
    paths = [path for room in rooms for path in room.rglob("*.py") if path.relative_to(room).parts[0] not in _NOT_RUN]
    parts = sorted(part for path in paths for part in _parts_of(path.read_text(encoding="utf-8")))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _parts_of(code: str) -> list[str]:
    return [ast.dump(item) for item in _Bare().visit(ast.parse(code)).body]


class _Bare(ast.NodeTransformer):
    """Leaves docstrings and imports out."""

    def visit_Import(self, node: ast.Import) -> None:
        return None

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        return None

    def visit_Expr(self, node: ast.Expr) -> ast.Expr | None:
        return None if isinstance(node.value, ast.Constant) else node

"""Results of `upstream.py`, and their table."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Row:
    """One test.

    Attributes:
        test: file::class::name.
        regions, recomputations: how many of ours ran in it; none where the compiler takes the region into its graph.
        reason: why the outcomes differ.
    """

    file: str
    test: str
    upstream: str
    ours: str
    upstream_message: str
    our_message: str
    regions: int
    recomputations: int
    reason: str

    @property
    def differs(self) -> bool:
        """Return whether the outcome depends on the engine."""
        return self.upstream != self.ours


@dataclass(frozen=True)
class Source:
    """The source of the tests.

    Attributes:
        version: what is in its `version.txt`.
        commit: None if it is not a git checkout.
        archive: {name: sha256} of the file that it was unpacked from, if that was given.
        files: {test file: sha256}.
    """

    version: str
    commit: str | None
    archive: dict[str, str]
    files: dict[str, str]

    @property
    def digest(self) -> str:
        """One sha256 for all test files, which tells whether two results are of the same tests."""
        lines = [f"{digest}  {file}\n" for file, digest in sorted(self.files.items())]
        return hashlib.sha256("".join(lines).encode()).hexdigest()


@dataclass(frozen=True)
class Results:
    """The outcomes of the tests, and what is wrong with them."""

    torch: str
    python: str
    source: Source
    rows: list[Row]
    problems: list[str]

    @property
    def name(self) -> str:
        """Of the files."""
        return f"upstream-torch{self.torch.partition('+')[0]}-tests{self.source.version}"

    def to_json(self) -> str:
        """Everything."""
        return json.dumps({**asdict(self), "digest of the test files": self.source.digest}, indent=1) + "\n"


def summary(rows: Sequence[Row]) -> str:
    """Counts, in words."""
    same = Counter(row.ours for row in rows if not row.differs)
    explained = Counter(bool(row.reason) for row in rows if row.differs)
    counts = [f"{count} {result} on both" for result, count in sorted(same.items())]
    counts += [f"{explained[True]} asserting a lifted limit"] if explained[True] else []
    counts += [f"{explained[False]} NOT EXPLAINED"] if explained[False] else []
    return f"{len(rows)} tests: {', '.join(counts)}"


def to_markdown(results: Results) -> str:
    """The table."""
    source = results.source
    origin = [f"commit {source.commit}"] if source.commit else []
    origin += [f"`{name}`, sha256 `{digest}`" for name, digest in source.archive.items()]
    origin += [f"test files together: sha256 `{source.digest}`"]
    lines = [
        "# PyTorch's own checkpoint tests on reactivate",
        "",
        f"torch {results.torch}, Python {results.python}, on a CPU. The tests are those of torch {source.version} "
        f"({'; '.join(origin)}). Each ran with torch's checkpoint and with the drop-in installed.",
        "",
        f"{summary(results.rows)}.",
        "",
        "Most of the skipped tests need an accelerator. A test that fails on both does not hold with this torch, with any "
        "checkpoint; the messages are in the JSON beside this file. Regions and recomputations are those of reactivate's "
        "engine. A test without regions calls no checkpointed function, or a compiler takes the region into its graph: "
        "then the test shows that the drop-in leaves the region to the compiler.",
    ]
    for file, digest in source.files.items():
        rows = [row for row in results.rows if row.file == file]
        lines += ["", f"## {file}", "", f"sha256 `{digest}`. {summary(rows)}.", ""]
        lines += [
            "| test | torch | reactivate | regions | recomputations | why they differ |",
            "|---|---|---|---:|---:|---|",
        ]
        for row in rows:
            name = row.test.removeprefix(f"{file}::")
            why = (row.reason or "not explained") if row.differs else ""
            lines.append(f"| {name} | {row.upstream} | {row.ours} | {row.regions} | {row.recomputations} | {why} |")
    return "\n".join(lines) + "\n"

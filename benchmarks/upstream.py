"""PyTorch's own checkpoint tests on this engine.

python benchmarks/upstream.py CHECKOUT                     compare, and say what differs
python benchmarks/upstream.py CHECKOUT --out DIRECTORY     JSON and Markdown as well, named for the versions of torch
python benchmarks/upstream.py CHECKOUT --only test_utils   one file

The tests are not in torch's wheel, so CHECKOUT is its source: of it only `test/` and `version.txt` are used. Each test
runs twice on the installed torch, with torch's checkpoint and with `reactivate.dropin.install()`. The two outcomes have
to be the same, except where a test asserts a limit of torch's that this engine does not have: these are listed below.
The exit status is 1 if a test differs without a reason there, or a reason is there for a test that does not differ.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from _presentation import write
from _upstream_run import REACTIVATE, SECTIONS, TORCH, Outcome, Section, Source, describe_source, run


@dataclass(frozen=True)
class Lifted:
    """A limit of torch's that a test asserts, and that this engine does not have.

    Attributes:
        limit: why the test differs.
        message: part of what it fails with. With anything else it has failed for another reason.
    """

    limit: str
    message: str


_STATE = "A recomputation sees a module's attributes as the forward pass saw them and changes them once"
_REENTRANT_GRAD = "`torch.autograd.grad` works with `use_reentrant=True`; the test expects torch to refuse it."
_DETACHED = (
    "With `use_reentrant=True`, an output that needs no gradient is what it is without checkpointing; the test expects "
    "torch to refuse it."
)
_OTHER_GRAPH = (
    "A compiled function is recomputed by the graph that its forward pass ran, where torch may take another and advises "
    "how to avoid that; the test expects the words of that advice."
)

LIFTED = {
    "test_autograd.py::TestAutograd::test_checkpoint_error_suggests_mark_dynamic": Lifted(
        _OTHER_GRAPH,
        "'Use torch._dynamo.mark_dynamic()",
    ),
    "test_autograd.py::TestAutograd::test_checkpoint_graph_execution_group": Lifted(
        "Backward calls in a `GraphExecGroup` may need the same saved tensor, which is recomputed once more; the test "
        "expects torch to refuse the second one.",
        "RuntimeError not raised",
    ),
    "test_autograd.py::TestAutograd::test_checkpoint_valid_reset_on_error": Lifted(
        _REENTRANT_GRAD,
        "Exception not raised",
    ),
    "test_autograd.py::TestAutograd::test_checkpointing_without_reentrant_custom_function_works": Lifted(
        "A custom function may read `saved_tensors` twice in one backward; the test expects torch to refuse that.",
        "RuntimeError not raised",
    ),
    "test_autograd.py::TestAutograd::test_checkpointing_without_reentrant_detached_tensor_use_reentrant_True": Lifted(
        _DETACHED,
        "RuntimeError not raised",
    ),
    "test_utils.py::TestCheckpoint::test_checkpoint_non_tensor_inputs_outputs": Lifted(
        "With `use_reentrant=True`, an output that is an input is that input, through which a backward can go again; the "
        "test expects torch to refuse it.",
        "RuntimeError not raised",
    ),
    "test_utils.py::TestCheckpoint::test_checkpoint_partial_grad": Lifted(
        "With `use_reentrant=True`, an output that needs no gradient is what it is without checkpointing, so `backward` "
        "says what it says there; the test expects the words of torch's checkpoint.",
        '"none of output has requires_grad=True',
    ),
    "test_utils.py::TestCheckpoint::test_checkpoint_trigger": Lifted(
        f"{_STATE}; the test expects a counter of calls to advance in the recomputation too.",
        "Scalars are not equal!",
    ),
    "test_utils.py::TestCheckpoint::test_checkpoint_valid": Lifted(
        _REENTRANT_GRAD,
        "RuntimeError not raised",
    ),
    "distributed/_composable/test_checkpoint.py::TestCheckpoint::test_checkpoint_kwargs": Lifted(
        f"{_STATE}; the test's module finds out by a counter that it is being recomputed, and then raises another error.",
        '"bar" does not match "foo"',
    ),
    "distributed/_composable/test_checkpoint.py::TestCheckpoint::test_clears_state_on_error_in_forward": Lifted(
        f"{_STATE}; the test's module finds out by a counter that it is being recomputed, and then raises.",
        "RuntimeError not raised",
    ),
    "inductor/test_compiled_autograd.py::TestCompiledAutograd::test_checkpointing_simple_reentrant_True": Lifted(
        "With `use_reentrant=True` the backward is that of the function's own ops, which read what is recomputed between "
        "compiled graphs; the test expects the three graphs of torch's reentrant variant, and finds four. The gradients, "
        "which it compares first, are the same.",
        "Scalars are not equal!",
    ),
    "distributed/_tools/test_mod_tracker.py::TestModTracker::test_ac": Lifted(
        "The forward hooks of a module that is the region fire once; the test expects them in the recomputation too.",
        "The length of the sequences mismatch: 12 != 14",
    ),
}
"""Every test that passes on torch's checkpoint and fails on ours."""


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


def compare(section: Section, checkout: Path) -> list[Row]:
    """Both runs of a section."""
    theirs = run(section, checkout, TORCH)
    ours = run(section, checkout, REACTIVATE)
    none = Outcome("not run")
    rows = []
    for test in sorted({*theirs, *ours}):
        their, our = theirs.get(test, none), ours.get(test, none)
        messages = (their.message, our.message)
        lifted = LIFTED.get(test)
        reason = lifted.limit if lifted is not None and lifted.message in our.message else ""
        rows.append(
            Row(section.file, test, their.result, our.result, *messages, our.regions, our.recomputations, reason)
        )
    print(f"{section.file}: {summary(rows)}", flush=True)
    return rows


def find_problems(rows: Sequence[Row], sections: Iterable[Section]) -> Iterator[str]:
    """List the tests that have to be looked into."""
    for row in rows:
        if row.differs and not row.reason:
            yield f"{row.test}: {row.upstream} on torch's checkpoint, {row.ours} on reactivate: {row.our_message}"
    files = {section.file for section in sections}
    differing = {row.test for row in rows if row.differs}
    for test in LIFTED:
        if test.partition("::")[0] in files and test not in differing:
            yield f"{test} is listed as one that asserts a lifted limit, and does not differ."
    if SECTIONS[0].file in files and not any(row.recomputations for row in rows):
        yield "No region was recomputed in any test: the drop-in was not in place."


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


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    options = parse(arguments)
    sections = [section for section in SECTIONS if not options.only or Path(section.file).stem in options.only]
    rows = [row for section in sections for row in compare(section, options.checkout)]
    source = describe_source(options.checkout, options.archive, [section.file for section in sections])
    problems = list(find_problems(rows, sections))
    results = Results(torch.__version__, platform.python_version(), source, rows, problems)
    if options.out:
        write(options.out, results.name, json=results.to_json(), md=to_markdown(results))
    sys.exit("\n".join(problems) or None)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Checked options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [Path(section.file).stem for section in SECTIONS]
    parser.add_argument("checkout", type=Path, help="torch's source")
    parser.add_argument("--archive", type=Path, help="what CHECKOUT was unpacked from; its hash goes into the results")
    parser.add_argument("--only", choices=names, nargs="+", metavar="FILE", help=", ".join(names))
    parser.add_argument("--out", type=Path, metavar="DIRECTORY", help="where to write the results")
    options = parser.parse_args(arguments)
    options.checkout = options.checkout.resolve()
    if not (options.checkout / "test" / SECTIONS[0].file).is_file():
        parser.error(f"{options.checkout} is no checkout of torch: it has no test/{SECTIONS[0].file}.")
    if options.out and options.only:
        parser.error("--out writes results of every file; leave --only out.")
    return options


if __name__ == "__main__":
    main()

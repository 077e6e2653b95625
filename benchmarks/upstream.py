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
import hashlib
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import _upstream_plugin as plugin
import torch
from _upstream_results import Results, Row, Source, summary, to_markdown


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
class Section:
    """Tests of one file.

    Attributes:
        file: below `test/`.
        select: pytest's `-k`, for files with other tests too.
        limit_seconds: for one run of them.
    """

    file: str
    select: str = ""
    limit_seconds: float = 600


SECTIONS = (
    Section("test_autograd.py", "checkpoint"),
    Section("test_utils.py", "TestCheckpoint"),
    Section("test_module_tracker.py", "confused_hierarchy"),
    Section("test_nestedtensor.py", "activation_checkpoint"),
    Section("functorch/test_vmap.py", "test_checkpoint"),
    Section("distributed/_composable/test_checkpoint.py"),
    Section("distributed/_tools/test_mod_tracker.py", "test_ac"),
    Section("distributed/fsdp/test_checkpoint_wrapper.py"),
    Section("dynamo/test_activation_checkpointing.py"),
    Section("dynamo/test_aot_autograd_cache.py", "sac_ or checkpoint_with_dropout or changing_cache_hash"),
    Section("dynamo/test_aot_compile.py", "with_checkpoint"),
    Section("dynamo/test_repros.py", "recompile_with_ac"),
    Section("higher_order_ops/test_local_map.py", "sac or fx_annotations"),
    Section("inductor/test_compiled_autograd.py", "TestCompiledAutograd and checkpointing"),
)

# Neither the settings of this project nor those of torch, whose plugins are for its CI; and no file in the checkout.
PYTEST_ALONE = ("-c", os.devnull, "--rootdir", ".", "--noconftest", "-p", "no:cacheprovider", "--tb=short")


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    options = parse(arguments)
    sections = [section for section in SECTIONS if not options.only or Path(section.file).stem in options.only]
    rows = [row for section in sections for row in compare(section, options.checkout)]
    source = describe_source(options.checkout, options.archive, [section.file for section in sections])
    problems = list(find_problems(rows, sections))
    results = Results(torch.__version__, platform.python_version(), source, rows, problems)
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        path = options.out / results.name
        path.with_name(path.name + ".json").write_text(results.to_json(), encoding="utf-8")
        path.with_name(path.name + ".md").write_text(to_markdown(results), encoding="utf-8")
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


def compare(section: Section, checkout: Path) -> list[Row]:
    """Both runs of a section."""
    theirs = run(section, checkout, plugin.TORCH)
    ours = run(section, checkout, plugin.REACTIVATE)
    none = plugin.Outcome("not run")
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


def run(section: Section, checkout: Path, engine: str) -> dict[str, plugin.Outcome]:
    """{test: outcome} of one run, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        file, log = Path(folder) / "outcomes.json", Path(folder) / "log"
        run_pytest(section, checkout / "test", ["--engine", engine, "--outcomes", str(file)], log)
        if not file.is_file() or not (outcomes := json.loads(file.read_text(encoding="utf-8"))):
            end = log.read_text(encoding="utf-8", errors="replace")[-4000:]
            sys.exit(f"{end}\nNo test of {section.file} ran to its end on {engine}.")
    for outcome in outcomes.values():
        outcome["message"] = outcome["message"].replace(f"{checkout}{os.sep}", "")
    return {test: plugin.Outcome(**outcome) for test, outcome in outcomes.items()}


def run_pytest(section: Section, tests: Path, options: Sequence[str], log: Path) -> None:
    """Run a section with the plugin, which takes `options`.

    What it prints goes to a file: a pipe would be held open by the processes that the compiler leaves behind.
    """
    path = os.pathsep.join(filter(None, (str(Path(__file__).parent), os.environ.get("PYTHONPATH"))))
    environment = {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", "PYTORCH_TEST_WITH_SLOW": "1"}
    command = [sys.executable, "-m", "pytest", *PYTEST_ALONE, "-p", plugin.__name__, *options]
    with log.open("wb") as output:
        try:
            subprocess.run(
                [*command, "-k", section.select, section.file],
                cwd=tests,
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=section.limit_seconds,
            )
        except subprocess.TimeoutExpired:
            sys.exit(f"{section.file} ran longer than {section.limit_seconds:.0f} s.")


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


def describe_source(checkout: Path, archive: Path | None, files: Sequence[str]) -> Source:
    """Return the source of the tests."""
    commit = None
    if (checkout / ".git").exists():
        command = ["git", "-C", str(checkout), "rev-parse", "HEAD"]
        commit = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    return Source(
        (checkout / "version.txt").read_text(encoding="utf-8").strip(),
        commit,
        {} if archive is None else {archive.name: sha256(archive)},
        {file: sha256(checkout / "test" / file) for file in files},
    )


def sha256(path: Path) -> str:
    """Of a file's content."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


if __name__ == "__main__":
    main()

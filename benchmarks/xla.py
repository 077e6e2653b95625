"""Measure what XLA's compiler makes of checkpointed regions, against torch's and torch_xla's own; no accelerator needed.

python benchmarks/xla.py                         every model on the terminal, in about ten minutes
python benchmarks/xla.py --models mlp,open       some of them
python benchmarks/xla.py --out DIRECTORY         a JSON file as well
python benchmarks/xla.py --out DIRECTORY --page PAGE    and a page of the docs of the JSON file there
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec

from _presentation import (
    Machine,
    Record,
    Table,
    cpu_name,
    megabytes,
    names_of_models,
    read,
    require,
    show,
    with_page,
    write,
)
from _timing import Track, progress, silent
from _xla_case import (
    ALTERNATE,
    CONTEXT,
    KEEPS_BARRIERS,
    LINEARS,
    MODELS,
    NONE,
    OURS,
    TORCH,
    TORCH_XLA,
    WAYS,
    Case,
    Size,
    measured,
)

OF_TORCH_XLAS = 1.2
"""What the temp may be at most, as a part of that with torch_xla's own function."""

UNKEPT = (NONE, OURS)
"""The ways that are measured a second time, with XLA:CPU dropping barriers early as it is built to."""


@dataclass(frozen=True)
class Verdict:
    """A target, and what was found.

    Attributes:
        ratio: of the temps, rounded to what the page shows.
        target: what it may be at most.
    """

    model: str
    against: str
    ratio: float
    target: float

    @property
    def words(self) -> str:
        return "met" if self.ratio <= self.target else "missed"


@dataclass(frozen=True)
class Results(Record):
    """The findings of the benchmark.

    Attributes:
        sizes: {model: its size}.
    """

    benchmark = "xla"
    sizes: dict[str, Size]
    cases: list[Case]

    def case(self, model: str, way: str, keeps_barriers: bool = True) -> Case | None:
        wanted = (model, way, keeps_barriers)
        return next((case for case in self.cases if (case.model, case.way, case.keeps_barriers) == wanted), None)

    def ratio(self, case: Case, way: str = NONE) -> float | None:
        """The temp as a part of that of another way of the same model; None where that was not measured."""
        other = self.case(case.model, way, case.keeps_barriers)
        return None if other is None else case.compiled.temp_bytes / other.compiled.temp_bytes

    def verdicts(self) -> Iterator[Verdict]:
        """Every target, of what was measured."""
        for model in self.sizes:
            ours = self.case(model, OURS)
            for against, target in ((NONE, MODELS[model].target), (TORCH_XLA, OF_TORCH_XLAS)):
                ratio = None if ours is None else self.ratio(ours, against)
                if ratio is not None:
                    yield Verdict(model, against, round(ratio, 3), target)


def measure(
    models: Iterable[str], ways: Iterable[str], sizes: dict[str, Size] | None = None, track: Track = silent
) -> Results:
    """Every model in every way, each in a process of its own."""
    chosen = {name: (sizes or {}).get(name, MODELS[name].size) for name in models}
    plan = [(way, True) for way in WAYS if way in ways] + [(way, False) for way in UNKEPT if way in ways]
    machine: Machine = {
        "device": "cpu",
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
    }
    cases = []
    for model, size in chosen.items():
        tick = track(model, len(plan))
        for way, keeps_barriers in plan:
            case, versions = measured(model, way, size, keeps_barriers)
            cases.append(case)
            machine |= versions
            tick()
    return Results(machine, chosen, cases)


# -- tables -----------------------------------------------------------------------------------------------------------


HEADER = ("way", "barriers", "dots", "compiled", "generators", "compiled", "outputs")
HEADER += ("temp, MB", "of none's", "all buffers, MB")
"""What was traced, and what is left of it when it is compiled."""


def target_table(results: Results) -> Table:
    """Every target."""
    rows = [
        (MODELS[found.model].title, found.against, f"{found.ratio:.3f}", f"{found.target:.2f}", found.words)
        for found in results.verdicts()
    ]
    return Table(f"Targets: the temp with {OURS}", ("model", "as a part of that with", "ratio", "at most", ""), rows)


def model_tables(results: Results) -> Iterator[Table]:
    """All figures of each model."""
    for model, size in results.sizes.items():
        rows = [_row(results, case) for case in results.cases if case.model == model and case.keeps_barriers]
        yield Table(f"{MODELS[model].title}: {size}", HEADER, rows)


def early_table(results: Results) -> Table:
    """Tabulate what is left where XLA:CPU drops barriers before it schedules."""
    rows = []
    for model in results.sizes:
        found = [results.case(model, way, keeps_barriers=False) for way in UNKEPT]
        if all(found):
            rows.append((MODELS[model].title, *(cell for case in found if case for cell in _figures(case))))
    return Table("Without the flag", ("model", f"{NONE}: dots", "temp, MB", f"{OURS}: dots", "temp, MB"), rows)


def _row(results: Results, case: Case) -> tuple[str, ...]:
    traced, compiled = case.traced, case.compiled
    ratio = results.ratio(case)
    counts = (traced.barriers, traced.dots, compiled.dots, traced.draws, compiled.draws, compiled.outputs)
    return (
        case.way,
        *map(str, counts),
        megabytes(compiled.temp_bytes),
        "" if ratio is None else f"{ratio:.2f}",
        megabytes(compiled.total_bytes),
    )


def _figures(case: Case) -> tuple[str, str]:
    return str(case.compiled.dots), megabytes(case.compiled.temp_bytes)


# -- the page ---------------------------------------------------------------------------------------------------------


ABOUT = f"""# On XLA, measured

On XLA, forward, recomputation and backward form one graph. The compiler merges equal ops on equal inputs (CSE), which
undoes a checkpoint. Regions of reactivate put optimization barriers (`opt-barrier`) between forward and recomputation. The
barriers also depend on the gradient of the region's output. This page shows the programs that XLA compiles from them.

**These are figures of XLA's CPU compiler.** Those of the compiler of TPUs are on [another page](tpu-measured.md).

`benchmarks/xla.py --page` wrote this page from its results: no figure is edited by hand.

## How it is measured

One step, forward, loss and backward in fp32, is traced and compiled on torch_xla with `PJRT_DEVICE=CPU`, each case in a
process of its own. CallSummary are read from the program that torch_xla traced and from what XLA dumps (`--xla_dump_to`).

- *barriers*: the number of `opt-barrier`s in the traced program: one per region, and one for each result that a saved call
  kept.
- *dots*: the number of matrix products, as traced and as *compiled*. If the second number is smaller, the compiler merged
  equal products.
- *generators*: the number of random number generators, likewise. XLA:CPU expands each into a hash of a counter, so these
  hashes are counted. A recomputation starts from the seed of the forward, but as another input of the program: its numbers
  are equal, and are never merged. Since they depend only on that seed, the compiler may draw them before the backward
  begins and keep them until then, as with torch_xla's own function.
- *outputs*: the number of outputs of the compiled program. If it is larger than without checkpointing, the program holds or
  writes additional tensors.
- *temp*: the memory that XLA preallocates for tensors that are neither input nor output (`preallocated-temp`). A kept
  tensor may also lie in the memory of a later output, if it fits there: *all buffers* includes inputs and outputs. Any
  checkpointing of blocks needs at least the inputs of the other blocks, and the tensors that one block computes in forward
  and backward.

XLA's flags are `{KEEPS_BARRIERS}`, since XLA:CPU otherwise drops barriers
before it schedules, JAX's included; the last table is without this flag. The flag is for measuring on a CPU: the compiler of
TPUs keeps barriers without one.

The rows of the tables:

- *{NONE}*: no checkpointing.
- *{TORCH}*: `torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)`, with the `torch.xla` that reactivate
  registers and without which it fails. This is the negative control.
- *{CONTEXT}*: the same with `context_fn=reactivate.dropin.xla.context_fn`. The recomputation is not merged, but
  torch's function does not tell which gradients it depends on, so it may run before the backward, and then saves nothing:
  so it is here, and not [on TPUs](tpu-measured.md).
- *{TORCH_XLA}*: `torch_xla.utils.checkpoint.checkpoint(block.forward, x)`. It puts the parameters themselves behind
  barriers, so they become outputs.
- *{OURS}*: `reactivate.checkpoint(block)(x)`.
- *{ALTERNATE}*: `reactivate.checkpoint(block, policy=every_nth(2, save_ops("linear")))(x)`, and *{LINEARS}*:
  with `policy=save_ops("linear")`. Both save only the first of the two linears of an MLP block, since no backward
  reads the result of the second."""

EARLY = "XLA:CPU without the flag: it drops the barriers before its last CSE and before it schedules."


def to_markdown(results: Results) -> str:
    """The page."""
    machine = results.machine
    blocks = [
        ABOUT,
        f"{machine['cpu']}, Python {machine['python']}, torch {machine['torch']}, torch_xla {machine['torch_xla']}.",
        "## Targets",
        "The temp should be at most 0.35 of the temp without checkpointing for the MLP, 0.4 for the transformer, 0.5 if a "
        f"region ends in ops that save nothing; and at most {OF_TORCH_XLAS:g} of the temp with torch_xla's own function.",
        target_table(results).to_markdown(),
    ]
    for table in model_tables(results):
        blocks += [f"## {table.title}", table.to_markdown()]
    early = early_table(results)
    return "\n\n".join([*blocks, f"## {early.title}", EARLY, early.to_markdown()]) + "\n"


# -- the command line -------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    options = parse(arguments)
    if options.models:
        if find_spec("torch_xla") is None:
            sys.exit("This needs torch_xla: pip install torch_xla, with the version of torch that goes with it.")
        results = _run(options.models, quietly=options.json)
        if options.out:
            write(options.out, results.name, json=results.to_json())
    if options.page:  # of several versions of torch the last
        results = read(Results, max(options.out.glob("xla-*.json")))
        options.page.write_text(to_markdown(results), encoding="utf-8")


def _run(models: Iterable[str], quietly: bool) -> Results:
    """Measure, with progress and tables, or print nothing but JSON."""
    if quietly:
        results = measure(models, WAYS)
        sys.stdout.write(results.to_json())
        return results
    require("rich")
    with progress() as track:
        results = measure(models, WAYS, track=track)
    show([target_table(results), *model_tables(results), early_table(results)])
    return results


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Checked options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--models",
        type=partial(names_of_models, MODELS),
        default=[*MODELS],
        help=f"of {', '.join(MODELS)}; '' for none",
    )
    parser.add_argument("--json", action="store_true", help="print the results as JSON instead of tables")
    options = with_page(parser, arguments)
    if options.out and 0 < len(options.models) < len(MODELS):
        parser.error("--out writes results of every model: leave --models out")
    return options


if __name__ == "__main__":
    main()

"""Measure what the compilers of TPUs make of checkpointed regions, against torch's and torch_xla's own; no TPU needed.

python benchmarks/tpu.py --out DIRECTORY         what the JSON file there lacks: half an hour for all of it
python benchmarks/tpu.py --out DIRECTORY --page PAGE    and a page of the docs of it
python benchmarks/tpu.py --topologies v5e:1x1    some of the TPUs; likewise --models

It runs where torch_xla is; the variable TPU_PYTHON names the Python of an environment with libtpu (see `_tpu_case.py`).
"""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial

from _presentation import Machine, Record, Table, cpu_name, megabytes, names_of_models, read, show, with_page, write
from _tpu_case import TOPOLOGIES, Case, measured
from _xla_case import CONTEXT, LINEARS, MODELS, NONE, OURS, TORCH, TORCH_XLA, Size

OF_TORCH_XLAS = 1.05
"""What the temp may be at most, as a part of that with torch_xla's own function."""

SIZES = {"mlp": Size(6, 256, (16384,)), "dropout": Size(4, 256, (8, 512))}
"""{model: its size}: activations that no TPU here has in the memory on its chip (128 MiB), which the temp leaves out."""

WAYS = (NONE, TORCH, CONTEXT, TORCH_XLA, OURS, LINEARS)


@dataclass(frozen=True)
class Results(Record):
    """The findings of the benchmark.

    Attributes:
        sizes: {model: its size}.
    """

    benchmark = "tpu-ahead-of-time"
    sizes: dict[str, Size]
    cases: list[Case]

    def case(self, model: str, way: str, topology: str) -> Case | None:
        wanted = (model, way, topology)
        return next((case for case in self.cases if (case.model, case.way, case.topology) == wanted), None)

    def ratio(self, case: Case, way: str) -> float | None:
        """The temp as a part of that of another way; None where that was not measured, or has no temp."""
        other = self.case(case.model, way, case.topology)
        return None if other is None or not other.temp_bytes else case.temp_bytes / other.temp_bytes

    def missing(self, topologies: Iterable[str]) -> Iterator[tuple[str, str, str]]:
        """List what is not measured yet: (model, way, topology), the first topology first."""
        for topology in topologies:
            for model in self.sizes:
                yield from ((model, way, topology) for way in WAYS if self.case(model, way, topology) is None)


def new_results(sizes: dict[str, Size]) -> Results:
    """Return results without a case yet."""
    machine: Machine = {"device": "cpu", "cpu": cpu_name(), "python": platform.python_version(), "torch": ""}
    return Results(machine, sizes, [])


def measure(results: Results, topologies: Iterable[str]) -> Iterator[Results]:
    """Measure what is missing, and yield the results after every case.

    Raises:
        RuntimeError: a version is not the one that the other cases were measured with.
    """
    for model, way, topology in list(results.missing(topologies)):
        for case, versions in measured(model, way, [topology], size=asdict(results.sizes[model])):
            results = replace(results, machine=merged(results.machine, versions), cases=[*results.cases, case])
            yield results


def merged(machine: Machine, versions: dict[str, str]) -> Machine:
    """Return what the figures hold for, with these versions.

    Raises:
        RuntimeError: one is not the version that the other cases were measured with.
    """
    for name, found in versions.items():
        if (machine.get(name) or found) != found:
            raise RuntimeError(
                f"{name} is {found}, and the cases that are there were measured with {machine[name]}. Measure all of them "
                "again: delete the results, or give another --out."
            )
    return machine | versions


# -- tables -----------------------------------------------------------------------------------------------------------


HEADER = ("way", "barriers", "dots", "compiled", "temp, MB", "of none's", "of torch_xla's", "within 5 %", "peak, MB")


def tables(results: Results) -> Iterator[Table]:
    """Tabulate each model on each TPU."""
    for model, size in results.sizes.items():
        for topology in TOPOLOGIES:
            found = [results.case(model, way, topology) for way in WAYS]
            rows = [_row(results, case) for case in found if case is not None]
            if rows:
                yield Table(f"{MODELS[model].title} on {topology}: {size}", HEADER, rows)


def _row(results: Results, case: Case) -> tuple[str, ...]:
    against = results.ratio(case, TORCH_XLA)
    return (
        case.way,
        str(case.traced.barriers),
        str(case.traced.dots),
        str(case.dots),
        megabytes(case.temp_bytes),
        _shown(results.ratio(case, NONE)),
        _shown(against),
        "" if against is None else "met" if round(against, 3) <= OF_TORCH_XLAS else "missed",
        megabytes(case.peak_bytes),
    )


def _shown(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.3f}"


# -- the page ---------------------------------------------------------------------------------------------------------


ABOUT = f"""# On TPUs, compiled ahead of time

**No step ran on a TPU.** These are the programs that the compiler of TPUs (libtpu) makes of a training step, and the memory
that it assigns to them. It compiles on a machine without a TPU, for a TPU that is named (`get_topology_desc`).

`benchmarks/tpu.py --page` wrote this page from its results: no figure is edited by hand.

## How it is measured

One step, forward, loss and backward in fp32, is traced by torch_xla on its CPU device, written as StableHLO, and compiled
for one chip. The outputs of the program are the loss and the gradients, and no buffer is donated. What torch_xla's own
function makes of the parameters, more outputs, is left out. No flag of XLA is set: the compiler of TPUs keeps barriers
until it has scheduled, other than [that of the CPU](xla-measured.md).

- *barriers*: the number of `opt-barrier`s in the traced program.
- *dots*: the number of matrix products, as traced and as *compiled*. If the second number is smaller, the compiler merged
  equal products.
- *temp*: the memory of the TPU (HBM) for tensors that are neither input nor output. What fits into the memory on the chip
  (VMEM) is not in it: a model with small activations may have a temp of 0 in every way.
- *within 5 %*: "met" if the temp is at most {OF_TORCH_XLAS:g} of the temp with torch_xla's own function.
- *peak*: the most memory of the TPU that is in use at a time, inputs and outputs included.

The rows of the tables are those of [the measurement on the CPU](xla-measured.md#how-it-is-measured): *{NONE}*; *{TORCH}*'s
own checkpoint, the negative control; the same with `context_fn`; *{TORCH_XLA}*'s own checkpoint; *{OURS}*; and a policy that
saves every linear layer, which costs memory and saves the recomputation of these."""


def to_markdown(results: Results) -> str:
    """The page."""
    machine = results.machine
    packages = ("torch", "torch_xla", "jax", "jaxlib", "libtpu")
    told = ", ".join(f"{package} {machine[package]}" for package in packages if package in machine)
    kinds = ", ".join(f"`{name}` ({machine[name]})" for name in TOPOLOGIES if name in machine)
    compiler = str(machine.get("compiler", "")).removeprefix("Built on ")
    blocks = [
        ABOUT,
        f"{machine['cpu']}, Python {machine['python']}, {told} (built on {compiler}).",
        f"Topologies: {kinds}.",
    ]
    for table in tables(results):
        blocks += [f"## {table.title}", table.to_markdown()]
    return "\n\n".join(blocks) + "\n"


# -- the command line -------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    options = parse(arguments)
    results = new_results({model: SIZES[model] for model in options.models})
    path = options.out and options.out / f"{Results.benchmark}.json"
    if path and path.exists():
        results = read(Results, path)
    for found in measure(results, options.topologies):
        results, last = found, found.cases[-1]
        sys.stderr.write(f"{last.topology}, {last.model}, {last.way}: {megabytes(last.temp_bytes)} MB\n")
        if path:
            write(options.out, Results.benchmark, json=results.to_json())
    if options.page:
        options.page.write_text(to_markdown(results), encoding="utf-8")
    else:
        show(tables(results))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Checked options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    models = partial(names_of_models, SIZES)
    parser.add_argument("--models", type=models, default=[*SIZES], help=f"of {', '.join(SIZES)}")
    parser.add_argument(
        "--topologies", type=_topologies, default=[*TOPOLOGIES], help=f"of {', '.join(TOPOLOGIES)}; '' for none"
    )
    options = with_page(parser, arguments)
    if options.out and len(options.models) < len(SIZES):
        parser.error("--out writes results of every model: leave --models out")
    return options


def _topologies(text: str) -> list[str]:
    names = [name for name in text.split(",") if name]
    unknown = [name for name in names if name not in TOPOLOGIES]
    if unknown:
        raise argparse.ArgumentTypeError(f"no topology {', '.join(unknown)}; there are {', '.join(TOPOLOGIES)}")
    return names


if __name__ == "__main__":
    main()

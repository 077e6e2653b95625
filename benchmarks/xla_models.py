"""Measure models of transformers on XLA, with the drop-in in the place of torch's checkpoint function; no TPU needed.

python benchmarks/xla_models.py --out DIRECTORY         what the JSON file there lacks
python benchmarks/xla_models.py --out DIRECTORY --page PAGE    and a page of the docs of it
python benchmarks/xla_models.py --models gpt2 --out DIRECTORY  some of the models

It runs where torch_xla is; the variable TPU_PYTHON names the Python of an environment with libtpu (see `_tpu_case.py`).
"""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from _presentation import Machine, Record, Table, cpu_name, megabytes, names_of_models, read, show, with_page, write
from _tpu_case import Case
from _xla_case import KEEPS_BARRIERS, NONE, OURS, TORCH
from _xla_models_case import DROPOUT, KINDS, LEARNING_RATE, STEPS, WAYS, Found, Kind, Size, compared_elsewhere, compiled
from tpu import merged

TOPOLOGY = "v5e:1x1"


@dataclass(frozen=True)
class Results(Record):
    """The findings of the benchmark.

    Attributes:
        found: steps on a CPU.
        cases: a step compiled for a TPU.
    """

    benchmark = "xla-models"
    found: list[Found]
    cases: list[Case]

    def case(self, model: str, way: str) -> Case | None:
        return next((case for case in self.cases if (case.model, case.way) == (model, way)), None)

    def bits(self, model: str) -> list[Found]:
        """Of a model, op by op and compiled."""
        return [found for found in self.found if found.model == model]


def new_results() -> Results:
    """Return results without a finding yet."""
    machine: Machine = {"device": "cpu", "cpu": cpu_name(), "python": platform.python_version(), "torch": ""}
    return Results(machine, [], [])


def measure(results: Results, models: Iterable[str]) -> Iterator[Results]:
    """Measure what is missing, and yield the results after every process.

    Raises:
        RuntimeError: a version is not the one that the others were measured with.
    """
    for model in models:
        if not results.bits(model):
            found, versions = compared_elsewhere(model)
            results = replace(results, machine=merged(results.machine, versions), found=[*results.found, *found])
            yield results
        for way in WAYS:
            if results.case(model, way) is None:
                for case, versions in compiled(model, way, KINDS[model].large, [TOPOLOGY]):
                    machine = merged(results.machine, versions)
                    results = replace(results, machine=machine, cases=[*results.cases, case])
                    yield results


# -- tables -----------------------------------------------------------------------------------------------------------


def bits_table(results: Results) -> Table:
    """Tabulate how far the steps are from those without regions."""
    header = ("model", "run", "recomputations", "tensors", "equal", "seeds", "losses", "gradients", "parameters")
    found = [item for model in KINDS for item in results.bits(model)]
    return Table("Three steps", header, [_bits_row(item) for item in found])


def _bits_row(found: Found) -> tuple[str, ...]:
    return (
        KINDS[found.model].title,
        "op by op" if found.is_op_by_op else "compiled",
        *map(str, (found.recomputations, found.compared, found.equal)),
        "equal" if found.is_same_seed else "different",
        *("0" if far == 0 else f"{far:.1e}" for far in found.largest),
    )


def memory_tables(results: Results) -> Iterator[Table]:
    """Tabulate the step of each model, compiled for a TPU."""
    header = ("way", "barriers", "products", "compiled", "temp, MB", "of none's", "peak, MB")
    for model, kind in KINDS.items():
        rows = [_memory_row(results, case) for way in WAYS if (case := results.case(model, way)) is not None]
        if rows:
            yield Table(f"{kind.title}: {shape(kind, kind.large)}", header, rows)


def _memory_row(results: Results, case: Case) -> tuple[str, ...]:
    plain = results.case(case.model, NONE)
    ratio = "" if plain is None or not plain.temp_bytes else f"{case.temp_bytes / plain.temp_bytes:.3f}"
    counts = (case.traced.barriers, case.traced.dots, case.dots)
    return (case.way, *map(str, counts), megabytes(case.temp_bytes), ratio, megabytes(case.peak_bytes))


def shape(kind: Kind, size: Size) -> str:
    """Say the size of a model and its batch in words."""
    layers = f"{size.layers} layers" if kind.layer is None else f"two stages of {size.layers} layers"
    is_text = "input_ids" in kind.give(replace(size, batch=1, length=1))
    rows = f"{size.length} tokens" if is_text else f"{size.length} x {size.length} pixels"
    return f"{layers}, width {size.width}, {size.batch} x {rows}"


# -- the page ---------------------------------------------------------------------------------------------------------


ABOUT = f"""# Models of transformers on XLA

Models of transformers, with small configurations and random weights, whose layers go through
`torch.utils.checkpoint.checkpoint`: by `activation_checkpointing_enable` (`gradient_checkpointing_enable` before transformers
5.23), and of the ConvNeXt, which does not have that, each layer by hand. `reactivate.dropin.install()` puts regions in the
place of torch's function.

**No step ran on a TPU.** `benchmarks/xla_models.py --page` wrote this page from its results: no figure is edited by hand.

## Bits

{STEPS} steps with dropout of {DROPOUT:g} (of the ConvNeXt, stochastic depth) and AdamW (learning rate {LEARNING_RATE:g}) on
torch_xla's CPU device, in fp32, with and without regions. *op by op*: `torch_xla.experimental.eager_mode`, where each op is a
program of its own. *compiled*: a program a step, with the flag
`{KEEPS_BARRIERS}`, so that the compiler sees the barriers as that of TPUs does.

- *tensors*, *equal*: the losses, the last step's gradients and the parameters afterwards, and how many of these tensors are
  bitwise equal.
- *seeds*: whether the random numbers of the next step begin from the same seed.
- the last three columns: the largest difference of an element. A barrier changes which ops the compiler fuses, and a fused
  sum rounds differently: see [Bits](xla.md#bits). AdamW divides a gradient by its own size, so a last bit of a gradient near
  0 can move a parameter by a part of the learning rate."""

MEMORY = f"""## A step for a TPU

Forward, loss and backward, traced by torch_xla and compiled for one chip (`{TOPOLOGY}`) by libtpu, on a machine without a
TPU. [The page about TPUs](tpu-measured.md#how-it-is-measured) says what the columns are. *products* are the matrix products
and convolutions as traced, and as compiled. *{TORCH}*'s own checkpoint is the negative control: its recomputation is merged
with the forward, where no random number keeps the two apart. *{OURS}* is the same model with the drop-in installed."""


def to_markdown(results: Results) -> str:
    """The page."""
    machine = results.machine
    packages = ("torch", "torch_xla", "transformers", "jax", "jaxlib", "libtpu")
    told = ", ".join(f"{package} {machine[package]}" for package in packages if package in machine)
    about = f"{machine['cpu']}, Python {machine['python']}, {told}."
    kinds = (kind for kind in KINDS.values())
    sizes = "; ".join(f"{kind.title}: {shape(kind, kind.small)}" for kind in kinds)
    blocks = [ABOUT, bits_table(results).to_markdown(), f"Sizes: {sizes}.", about, MEMORY]
    for table in memory_tables(results):
        blocks += [f"### {table.title}", table.to_markdown()]
    return "\n\n".join(blocks) + "\n"


# -- the command line -------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    options = parse(arguments)
    results, path = new_results(), options.out and options.out / f"{Results.benchmark}.json"
    if path and path.exists():
        results = read(Results, path)
    for found in measure(results, options.models):
        results = found
        sys.stderr.write(f"{len(results.found)} comparisons, {len(results.cases)} compiled\n")
        if path:
            write(options.out, Results.benchmark, json=results.to_json())
    if options.page:
        options.page.write_text(to_markdown(results), encoding="utf-8")
    else:
        show([bits_table(results), *memory_tables(results)])


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Checked options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    models = partial(names_of_models, KINDS)
    parser.add_argument("--models", type=models, default=[*KINDS], help=f"of {', '.join(KINDS)}; '' for none")
    return with_page(parser, arguments)


if __name__ == "__main__":
    main()

"""Compare what plans promise with what a GPU gives: the peak, what its allocator reserves, and the seconds of a step.

python benchmarks/promises.py                       on the terminal, in some two minutes on a GPU
python benchmarks/promises.py --out DIRECTORY       JSON and Markdown as well, named for device and torch version

Each model is planned for two budgets, twice each: on the meta device for the name of a GPU, where nothing is measured, and
on the GPU itself. Each plan then trains a new model, on a GPU whose memory is empty: peak and reserved memory are those of
whole steps with AdamW after the first, all included; seconds are those of forward and backward, the median of five.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from operator import attrgetter
from pathlib import Path
from time import perf_counter

import torch
from _presentation import Table, describe_machine, write
from _subjects import make_subject
from _training import Size, Subject

import reactivate

STEPS = 6
"""Of a training; the first does not count."""
GIB = 2**30


@dataclass(frozen=True)
class Case:
    """A model and what it is trained on.

    Attributes:
        name: of the rows.
        make: builds it on the default device.
        budgets: as `reactivate.plan` takes them.
    """

    name: str
    make: Callable[[], Subject]
    budgets: Sequence[str]


@dataclass(frozen=True)
class Row:
    """A promise of a plan, and what came of it. Bytes with all included.

    Attributes:
        model: which.
        planned: "offline" or "on the device".
        planning_seconds: what the plan took.
    """

    model: str
    planned: str
    budget_bytes: int
    predicted_bytes: int
    measured_bytes: int
    predicted_reserved_bytes: int
    reserved_bytes: int
    predicted_seconds: float
    measured_seconds: float
    planning_seconds: float


def llama() -> Subject:
    """The model of `examples/llama.py`: 1.1 billion parameters, 16 x 2,048 tokens, bfloat16."""
    from transformers import LlamaConfig, LlamaForCausalLM  # an optional package

    config = LlamaConfig(
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=22,
        num_attention_heads=32,
        num_key_value_heads=4,
        vocab_size=32000,
        use_cache=False,
    )
    tokens = torch.randint(32000, (16, 2048))
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    given = {"input_ids": tokens, "labels": tokens}
    return Subject("llama", "Llama", model, (), given, loss=attrgetter("loss"), blocks=())


def subject(name: str, size: Size) -> Callable[[], Subject]:
    """A model of `frontier.py`, in float32."""
    return lambda: make_subject(name, size, torch.empty(()).device)


CASES = (
    Case("Llama, 1.1 billion parameters, bfloat16", llama, ("40GiB", "30GiB")),
    Case("GPT, 203 million parameters", subject("gpt", Size(16, 1024, 8, 1024)), ("60%", "25%")),
    Case("ResNet", subject("resnet", Size(12, 64, 64, 64)), ("60%", "35%")),
)


def planned(case: Case, budget: str | int, device: str, name: str) -> tuple[reactivate.Plan, float]:
    """Return a plan without its model, made on `device`, and the seconds that it took."""
    with torch.device(device):
        made = case.make()
    began = perf_counter()
    plan = reactivate.plan(
        *(made.model.train(), made.args, made.kwargs),
        loss=made.loss,
        budget=budget,
        optimizer=torch.optim.AdamW(made.model.parameters()),
        device=name if device == "meta" else None,
    )
    return reactivate.Plan.from_json(plan.to_json()), perf_counter() - began


def trained(case: Case, plan: reactivate.Plan) -> tuple[int, int, float]:
    """Return the peak, the reserved bytes and the seconds of steps with the plan."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.manual_seed(0)
    with torch.device("cuda"):
        made = case.make()
    reactivate.apply(made.model.train(), plan)
    optimizer = torch.optim.AdamW(made.model.parameters())
    seconds = []
    for index in range(STEPS):
        if index == 1:
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
        began = perf_counter()
        result = made.model(*made.args, **made.kwargs)
        made.loss(result).backward()
        torch.cuda.synchronize()
        seconds.append(perf_counter() - began)
        del result
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    return torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved(), statistics.median(seconds[1:])


def row_of(case: Case, where: str, plan: reactivate.Plan, planning_seconds: float) -> Row:
    """Train with a plan."""
    predicted = plan.predicted
    measured, reserved, seconds = trained(case, plan)
    return Row(
        *(case.name, where, plan.budget_bytes, predicted.peak_bytes, measured),
        *(predicted.reserved_bytes or 0, reserved, predicted.seconds, seconds, planning_seconds),
    )


def rows_of(case: Case, name: str) -> Iterator[Row]:
    """Plan offline for each budget, and for the same bytes on the device, if there is such a plan."""
    for budget in case.budgets:
        plan, seconds = planned(case, budget, "meta", name)
        yield row_of(case, "offline", plan, seconds)
        try:
            plan, seconds = planned(case, plan.budget_bytes, "cuda", name)
        except reactivate.errors.PlanInfeasible as error:
            print(error)
        else:
            yield row_of(case, "on the device", plan, seconds)


def to_table(rows: Sequence[Row], name: str) -> Table:
    """Return what was predicted and what was found."""
    header = (
        "model",
        "planned",
        "budget",
        "peak predicted",
        "peak",
        "reserve predicted",
        "reserve",
        "step predicted",
        "step",
    )

    def beside(found: float, predicted: float, text: str) -> str:
        return f"{text} ({found / predicted - 1:+.1%})" if predicted else text

    cells = [
        (
            *(row.model, row.planned, f"{row.budget_bytes / GIB:.2f} GiB", f"{row.predicted_bytes / GIB:.3f} GiB"),
            beside(row.measured_bytes, row.predicted_bytes, f"{row.measured_bytes / GIB:.3f} GiB"),
            f"{row.predicted_reserved_bytes / GIB:.2f} GiB",
            beside(row.reserved_bytes, row.predicted_reserved_bytes, f"{row.reserved_bytes / GIB:.2f} GiB"),
            f"{1000 * row.predicted_seconds:.0f} ms",
            beside(row.measured_seconds, row.predicted_seconds, f"{1000 * row.measured_seconds:.0f} ms"),
        )
        for row in rows
    ]
    return Table(f"What plans promise, and what a device gives (offline: as {name})", header, cells)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", help="of the GPU, as `reactivate devices` lists it (default: as torch names it)")
    parser.add_argument("--only", type=int, nargs="+", default=range(len(CASES)), help="numbers of models, from 0")
    parser.add_argument("--device", default="cuda", choices=["cuda"], help="where the plans are measured")
    parser.add_argument("--clock", default="wall", choices=["wall"], help="time of the wall")
    parser.add_argument("--out", type=Path, metavar="DIRECTORY", help="where to write the results")
    options = parser.parse_args(arguments)
    name = options.name or torch.cuda.get_device_name().split()[1]
    rows: list[Row] = []
    for case in (CASES[index] for index in options.only):
        for row in rows_of(case, name):
            rows.append(row)
            print(to_table([row], name).to_markdown().splitlines()[-1], flush=True)
            if options.out:
                machine = describe_machine(torch.device("cuda"))
                text = json.dumps({"machine": machine, "name": name, "rows": [*map(asdict, rows)]}, indent=1)
                device = torch.cuda.get_device_name().replace(" ", "-")
                file = f"promises-{device}-torch{torch.__version__.partition('+')[0]}"
                write(options.out, file, json=text + "\n", md=to_table(rows, name).to_markdown() + "\n")
    print(to_table(rows, name).with_title())


if __name__ == "__main__":
    main()

"""A byte-level GPT, trained twice from one seed: plain, and within a budget that the plain step exceeds several times.

python examples/byte_gpt.py --out demo           train, then a table here, and in demo/ the report of the plan (plan.html),
                                                 the plan (plan.json), a plot (byte_gpt.png) and results.json
python examples/byte_gpt.py --out demo --json    the results as JSON in the place of the table

The model (`reactivate/_byte_gpt.py`) is an ordinary one, and learns the source of Python's standard library, so nothing is
downloaded. Planning takes two lines, in `prepare`; the rest is an ordinary training loop and what it takes to show that the
two runs are the same, bit for bit: every loss, every gradient of the last step, every parameter, and the random number
generators afterwards. Where they are not, or the step takes more than the budget, the script says so, and exits with 1.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
from collections.abc import Callable, Generator, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

# Threads that wait sleep, which is kinder to a busy machine; the profiler keeps its log out of the progress bars.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("KINETO_LOG_LEVEL", "6")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

import torch
from torch import Tensor
from torch.profiler import record_function

import reactivate
from reactivate._byte_gpt import GPT, Size, batch_of, loss_of, standard_library

try:
    from _runs import Run, evidence_of, first_difference, watched
    from _show import LABELS, plot, table
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
except ImportError as error:
    sys.exit(f"This example needs {error.name}: pip install '.[demo]' in a clone")


@dataclass(frozen=True)
class Settings(Size):
    """The model and its training; each is an option of the command line."""

    budget: str = field(default="20%", metadata={"help": "of memory, as reactivate.plan takes it"})
    steps: int = field(default=16, metadata={"help": "training steps of each run"})
    seed: int = field(default=0, metadata={"help": "of both runs"})


# Training


@dataclass
class Trainee:
    """A model with its optimizer, and the plan that is applied to it."""

    model: GPT
    optimizer: torch.optim.Optimizer
    plan: reactivate.Plan | None = None


def prepare(settings: Settings, is_planned: bool) -> Trainee:
    """A model from the seed."""
    torch.manual_seed(settings.seed)
    random.seed(settings.seed)
    model = GPT(settings)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if not is_planned:
        return Trainee(model, optimizer)
    tokens = torch.zeros(settings.batch, settings.context + 1, dtype=torch.long)
    loss = partial(loss_of, tokens)
    plan = reactivate.plan(model, tokens[:, :-1], budget=settings.budget, loss=loss, optimizer=optimizer)
    reactivate.apply(model, plan)
    return Trainee(model, optimizer, plan)


Training = Generator[None, None, Run]


def train(settings: Settings, source: Tensor, trainee: Trainee, on_step: Callable[[float, float], None]) -> Training:
    """Train, one timed step at a time; the profiler watches one step more, which is not timed."""
    model, optimizer = trainee.model, trainee.optimizer

    def step(tokens: Tensor) -> Tensor:
        optimizer.zero_grad(set_to_none=False)  # gradients stay allocated, so that no timeline shows them
        with record_function("forward"):
            logits = model(tokens[:, :-1])
            loss = loss_of(tokens, logits)
        loss.backward()
        optimizer.step()
        return loss.detach()

    losses, step_seconds = [], []
    for _ in range(settings.steps):
        tokens = batch_of(source, settings)
        start = perf_counter()
        losses.append(step(tokens))
        step_seconds.append(perf_counter() - start)
        on_step(losses[-1].item(), step_seconds[-1])
        yield
    tokens = batch_of(source, settings)
    timeline = watched(lambda: losses.append(step(tokens)))
    return Run([loss.item() for loss in losses], step_seconds, timeline, evidence_of(losses, model), trainee.plan)


# The two runs


class Turns:
    """A training that takes turns with another: between its steps the random numbers are the other's."""

    def __init__(self, begin: Callable[[], Training]) -> None:
        self.training = begin()
        self.run: Run | None = None
        self._states = torch.get_rng_state(), random.getstate()

    def take(self) -> None:
        """Go on to the end of the next step, or of the run."""
        torch.set_rng_state(self._states[0])
        random.setstate(self._states[1])
        try:
            next(self.training)
        except StopIteration as end:
            self.run = end.value
        self._states = torch.get_rng_state(), random.getstate()


def train_both(settings: Settings, console: Console) -> tuple[Run, Run]:
    """Train plain and planned, a step of each in turn, so that a busy machine slows down both; with a bar for each."""
    source = standard_library()
    columns = (TextColumn("{task.description:12}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[now]}"))
    with Progress(*columns, console=console) as progress:
        both = [Turns(partial(begin, settings, source, label, progress)) for label in LABELS]
        while any(turns.run is None for turns in both):
            for turns in both:
                turns.take()
    plain, planned = (turns.run for turns in both if turns.run is not None)
    return plain, planned


def begin(settings: Settings, source: Tensor, label: str, progress: Progress) -> Training:
    """Prepare a training, with a bar."""
    bar = progress.add_task(label, total=settings.steps, now="")

    def on_step(loss: float, seconds: float) -> None:
        progress.update(bar, advance=1, now=f"loss {loss:.4f}  {seconds:.2f} s/step")

    return train(settings, source, prepare(settings, label != LABELS[0]), on_step)


def compare(settings: Settings, plain: Run, planned: Run) -> dict[str, Any]:
    """The results, as results.json has them."""
    one, other = plain.figures(), planned.figures()
    plan = planned.plan
    assert plan is not None
    difference = first_difference(plain, planned)
    results = {
        "settings": asdict(settings),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "identical": difference is None,
        "first_difference": difference,
        "ratios": {name: other[name] / one[name] for name in one},
        "plan": {
            "activation_budget_bytes": plan.budget_bytes - plan.fixed.total,
            "promised_activation_bytes": plan.predicted.peak_bytes - plan.fixed.total,
            "promised_ratio_of_step_seconds": plan.predicted.seconds / plan.plain.seconds,
            "planning_seconds": plan.planning_seconds,
        },
        "holds": other["peak_activation_bytes"] <= plan.budget_bytes - plan.fixed.total,
    }
    for label, run in zip(LABELS, (plain, planned)):
        results[label] = {**run.figures(), "losses": run.losses, "step_seconds": run.step_seconds}
    return results


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options of the command line: those of `Settings`, `out` and `json`."""
    parser = argparse.ArgumentParser(
        description="A byte-level GPT, trained twice from one seed: plain, and within a budget.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    for option in fields(Settings):
        parser.add_argument(f"--{option.name}", type=type(option.default), default=option.default, **option.metadata)
    parser.add_argument("--out", type=Path, default=Path("demo"), help="folder of what is written")
    parser.add_argument("--json", action="store_true", help="print the results as JSON, and no table")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, compare, show; the exit status is 1 where the runs differ."""
    options = parse(arguments)
    settings = Settings(**{option.name: getattr(options, option.name) for option in fields(Settings)})
    console = Console(stderr=options.json)
    plain, planned = train_both(settings, console)
    results = compare(settings, plain, planned)
    as_json = json.dumps(results, indent=2)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "results.json").write_text(as_json + "\n", encoding="utf-8")
    plot(plain, planned, results, options.out / "byte_gpt.png")
    planned.plan.save(options.out / "plan.json")
    planned.plan.save(options.out / "plan.html")
    if options.json:
        print(as_json)
    else:
        print("", planned.plan, "", sep="\n", flush=True)  # it knows how wide the terminal is
        console.print(table(results), "")
    written = ", ".join(str(options.out / name) for name in ("plan.html", "plan.json", "byte_gpt.png", "results.json"))
    console.print(f"Report, plan, plot, results: {written}", style="dim")
    if not results["identical"]:
        sys.exit(f"The planned run is not the plain one. The first difference: {results['first_difference']}.")
    if not results["holds"]:
        sys.exit("The planned step takes more memory than its budget.")


if __name__ == "__main__":
    main()

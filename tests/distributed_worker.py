"""One of the two processes of `test_distributed`.

    python distributed_worker.py RANK DIRECTORY

Each case has a process group of its own, so that a failure is not handed on to the next one, and a report of its own in
the directory, so that what is done is known even if a later case hangs.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from distributed_cases import CASES, PROCESSES, Case, Wrap, collectives, plain
from oracle import Ran, assert_bitwise, random_states, seed_everything
from surroundings import Kept
from torch.distributed.tensor import DTensor

import reactivate
from reactivate._passes.observing import observed_by

STEPS = 3
COLLECTIVE_TIMEOUT = timedelta(seconds=30)


@dataclass
class Report:
    """The findings of one process about a case."""

    error: str | None = None
    regions: int = 0
    recomputations: int = 0
    kept_bytes: int = 0
    kept_bytes_plain: int = 0
    collectives: list[list[Any]] = field(default_factory=list)
    collectives_plain: list[list[Any]] = field(default_factory=list)


def local(value: Any) -> Any:
    return value.to_local() if isinstance(value, DTensor) else value


def train(case: Case, wrap: Wrap) -> tuple[Ran, dict[str, Any]]:
    """All steps: what the engine did, and everything that there is to compare, by name."""
    seed_everything()
    training = case.make(wrap)
    optimizer = torch.optim.SGD(training.model.parameters(), lr=0.1)
    torch.manual_seed(dist.get_rank())
    ran, found = Ran(), {}
    with observed_by(ran):
        for step in range(STEPS):
            with ExitStack() as stack:
                kept = stack.enter_context(Kept()) if step == 0 else None
                losses = training.step(step)
            if kept is not None:
                ran.kept_bytes = kept.kept_bytes
            found |= {f"loss {index} of step {step}": loss.detach() for index, loss in enumerate(losses)}
            for name, parameter in training.model.named_parameters():
                gradient = parameter.grad
                found[f"gradient of {name} in step {step}"] = None if gradient is None else local(gradient).clone()
            optimizer.step()
            optimizer.zero_grad()
    found |= {f"parameter {name}": local(value.detach()).clone() for name, value in training.model.named_parameters()}
    found |= {f"buffer {name}": local(value).clone() for name, value in training.model.named_buffers()}
    return ran, found | random_states()


def unwrapped(found: dict[str, Any]) -> dict[str, Any]:
    """Return the names without what `checkpoint_wrapper` puts into them."""
    return {name.replace("_checkpoint_wrapped_module.", ""): value for name, value in found.items()}


def compare(case: Case) -> Report:
    report = Report()
    try:
        collectives.clear()
        plain_ran, expected = train(case, plain)
        report.collectives_plain = [*collectives]
        report.kept_bytes_plain = plain_ran.kept_bytes
        collectives.clear()
        with case.around():
            ran, found = train(case, partial(reactivate.checkpoint, early_stop=case.early_stop, check=case.check))
        report.regions, report.recomputations, report.kept_bytes = ran.regions, ran.recomputations, ran.kept_bytes
        report.collectives = [*collectives]
        found = unwrapped(found)
        assert expected.keys() == found.keys()
        for name, value in expected.items():
            assert_bitwise(value, found[name], name)
    except Exception:
        report.error = traceback.format_exc()
    return report


@contextmanager
def process_group(rank: int, store: Path) -> Iterator[None]:
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(store), PROCESSES),
        rank=rank,
        world_size=PROCESSES,
        timeout=COLLECTIVE_TIMEOUT,
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


def report_file(directory: Path, rank: int, index: int) -> Path:
    return directory / f"report-{rank}-{index}"


def main(rank: int, directory: Path) -> None:
    torch.set_num_threads(1)
    for index, case in enumerate(CASES.values()):
        with process_group(rank, directory / f"store-{index}"):
            report = compare(case)
        unfinished = directory / f"unfinished-{rank}"
        unfinished.write_text(json.dumps(asdict(report)))
        unfinished.rename(report_file(directory, rank, index))


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))

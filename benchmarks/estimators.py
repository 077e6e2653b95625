"""Plans of one rank of a sharded job beside torch's own estimators, and what a rank of gloo then takes.

python benchmarks/estimators.py                    on the terminal, in about ten minutes; needs pulp, pwlf and scipy
python benchmarks/estimators.py --out DIRECTORY    JSON and Markdown as well, named for device and torch version
python benchmarks/estimators.py --out DIRECTORY --page FILE    and the table between two marks of that page

The models are those of tests/plan_offline_cases.py. All answers about a model are made in one process that is a rank of
torch's process group `fake`, in turns, and their seconds, which are those of the processor, are medians. Then ranks of gloo
run each of the steps.

torch's cost model asks a GPU for two facts, its arithmetic and its bandwidth, and raises where there is none. So it is
given those of an H100 from our own table of devices; a row says what it does without them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from _presentation import Table, describe_machine, require, with_page, write
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import plan_offline_cases as cases
from memory import allocated_by_rank

import reactivate
from reactivate.errors import PlanInfeasible
from reactivate.planner.cost.devices import find

RANKS, ROUNDS, STEPS = 2, 3, 5
GPU = "H100-SXM"
MARKS = "<!-- estimators -->", "<!-- end of estimators -->"
HEADER = ("model", "asked", "who", "answer, bytes", "measured", "answer less measured", "CPU seconds", "what it says")
PEAK, PLAN, TIME = "peak of the plain step", "a plan within {:,} bytes", f"time of the plain step on {GPU}"
Json = dict[str, Any]


@dataclass(frozen=True)
class Model:
    """A model of the proof.

    Attributes:
        make: makes it sharded, over the mesh of all ranks.
        bare: makes it for torch's ILP, which divides parameters by itself; None where that takes the sharded one.
    """

    make: Callable[[], Any]
    bare: Callable[[], Any] | None = None


def parallel_llama() -> Any:
    """Return the Llama with tensor parallelism."""
    return cases.llama.parallelize(cases.small_llama(), cases.init_device_mesh("cpu", (dist.get_world_size(),)))


MODELS = {
    "Llama, FSDP2": Model(cases.sharded(cases.small_llama), cases.small_llama),
    "GPT, FSDP2": Model(cases.sharded(cases.small_gpt), cases.small_gpt),
    "Llama, tensor parallel": Model(parallel_llama),
}


@dataclass
class Row:
    """An answer.

    Attributes:
        answer_bytes, measured: of the peak of a rank; None where there is none.
        seconds: of the processor that the answer took, in each round.
        says: the rest of the answer, or the error.
        save: which calls of each checkpointed module are saved: {path: [(name, whether), ...]}; for torch's ILP.
        plan: of reactivate.
    """

    model: str
    asked: str
    who: str
    answer_bytes: int | None = None
    measured: int | None = None
    seconds: list[float] = field(default_factory=list)
    says: str = ""
    save: Json | None = None
    plan: Json | None = None

    @property
    def cells(self) -> tuple[str, ...]:
        """Cells of the table."""
        both = self.answer_bytes is not None and self.measured is not None
        off = f"{self.answer_bytes - self.measured:+,}" if both else ""  # type: ignore[operator]
        sizes = ["" if size is None else f"{size:,}" for size in (self.answer_bytes, self.measured)]
        seconds = f"{median(self.seconds):.2f}" if self.seconds else ""
        return (self.model, self.asked, self.who, *sizes, off, seconds, self.says)


# -- answers, in one process ------------------------------------------------------------------------------------------


@contextmanager
def alone() -> Iterator[None]:
    """Be the first of the ranks, the others of which are not there."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def gpu_facts() -> Iterator[None]:
    """Give torch's cost model the two facts that it asks a GPU for."""
    spec, facts = find(GPU), "torch.utils._runtime_estimation."
    rates = lambda dtype: spec.flops_per_second[str(dtype).removeprefix("torch.")] / 1e12  # noqa: E731
    with (
        mock.patch("torch.cuda.is_available", return_value=True),
        mock.patch(facts + "get_device_tflops", rates),
        mock.patch(facts + "get_gpu_dram_gbps", return_value=spec.bandwidth_bytes_per_second / 1e9),
    ):
        yield


def planned(one: Model, row: Row, budget: int | str, device: str = "cpu") -> reactivate.Plan:
    """Let reactivate plan a step."""
    with torch.device("meta"):
        model, batch = one.make(), cases.batch()
    plan = reactivate.plan(model, batch, budget=budget, device=device)
    assert isinstance(plan, reactivate.Plan)
    row.answer_bytes, row.plan = plan.predicted.peak_bytes, plan.to_json()
    done = Counter(decision.candidate.name for decision in plan.decisions)
    row.says = "; ".join(f"{count} of {len(plan.decisions)} blocks: {action}" for action, count in done.items())
    return plan


def tracked(one: Model, row: Row) -> None:
    """Let torch's tracker estimate the peak: that of the second step, when gradients are there."""
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
    from torch.distributed._tools.mem_tracker import MemTracker

    with faked(one.make) as (model, batch):
        tracker = MemTracker() if one.bare is None else FSDPMemTracker(model)
        tracker.track_external(*batch) if one.bare is not None else tracker.track_external(model, *batch)
        with tracker:
            for number in range(2):
                model(*batch).backward()
                if number == 0:
                    tracker.reset_mod_stats()
        row.answer_bytes = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]


@contextmanager
def faked(make: Callable[[], Any]) -> Iterator[tuple[Any, Any]]:
    """Yield a model and its batch on fake tensors."""
    mesh = cases.init_device_mesh("cpu", (RANKS,), mesh_dim_names=("shards",))  # reads values: not in the mode
    with (
        mock.patch.object(cases, "init_device_mesh", return_value=mesh),
        FakeTensorMode(),
    ):
        yield make(), cases.batch()


def timed(one: Model, row: Row) -> None:
    """Let torch estimate the time of a step."""
    from torch.distributed._tools.runtime_estimator import RuntimeEstimator

    with faked(one.bare or one.make) as (model, batch):
        model(*batch).backward()
        with RuntimeEstimator()("operator-level-cost-model") as estimator:
            model(*batch).backward()
        row.says = f"{estimator.total_runtime:.4f} ms, without collectives"


def timed_without_facts(one: Model, row: Row) -> None:
    """Let torch estimate the time of one product: an error in a whole step ends the process."""
    from torch.distributed._tools.runtime_estimator import RuntimeEstimator

    with FakeTensorMode():
        matrix = torch.ones(2, 2)
        with RuntimeEstimator()("operator-level-cost-model"):
            matrix @ matrix


def solved(one: Model, row: Row, budget: int) -> None:
    """Let torch's ILP decide what each block recomputes."""
    from torch.distributed._tools.ilp_utils import aggregate_stats, parse_module_info
    from torch.distributed._tools.mem_tracker import MemTracker
    from torch.distributed._tools.runtime_estimator import RuntimeEstimator
    from torch.distributed._tools.sac_estimator import SACEstimator
    from torch.distributed._tools.sac_ilp import get_optimal_checkpointing_policy_per_module, sac_milp

    runtimes, memory, trade_off = RuntimeEstimator(), MemTracker(), SACEstimator()
    with faked(one.bare or one.make) as (model, batch):
        model(*batch).backward()
        with runtimes("operator-level-cost-model"):
            model(*batch).backward()
        with trade_off("operator-level-cost-model"):
            model(*batch)
        memory.track_external(model, *batch)
        with memory:
            model(*batch).backward()
        info = aggregate_stats(model, memory, runtimes, trade_off, torch.device("cpu"))
        prefix = type(model).__name__ + "."
        blocks = [f"{prefix}blocks.{number}" for number in range(len(model.blocks))]
    world = 1 if one.bare is None else RANKS
    discarded, _, row.answer_bytes = sac_milp(parse_module_info(info), budget / 2**30, world, ac_units=blocks)
    row.save = {}
    if row.answer_bytes < 0:
        row.answer_bytes, row.save, row.says = None, None, "no plan: the solver finds none"
        return
    for path, share in discarded.items():
        stats = trade_off.sac_mod_stats[path]
        saves = get_optimal_checkpointing_policy_per_module(stats, 1 - share)
        row.save[path.removeprefix(prefix)] = list(zip(stats.func_names, saves, strict=True))
    parts = [f"{share:.0%} of {path.removeprefix(prefix)}" for path, share in discarded.items()]
    row.says = f"discard {', '.join(parts)}" if parts else "keep all"


def ask(row: Row, question: Callable[..., object], *given: object) -> None:
    """Ask, and take down the seconds or the error."""
    began = sum(os.times()[:4])  # of the processor, that of solvers counted
    try:
        question(MODELS[row.model], row, *given)
        row.seconds.append(sum(os.times()[:4]) - began)
    except Exception as error:
        row.says = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def budget_between(name: str) -> int:
    """Return a budget halfway between the plain step and the smallest plan, as the proof has it."""
    plain = planned(MODELS[name], Row(name, "", ""), "100%")
    try:
        plain.at(plain.fixed.total + 1)
    except PlanInfeasible as found:
        return (plain.plain.peak_bytes + found.least_bytes) // 2
    raise AssertionError("a plan has no activations")


def answers(name: str) -> list[Row]:
    """Return all answers about a model, each as often as there are rounds."""
    budget, tracker = budget_between(name), "MemTracker" if MODELS[name].bare is None else "FSDPMemTracker"
    asked = PLAN.format(budget)
    plain, kept = Row(name, PEAK, "reactivate"), Row(name, PEAK, f"torch: {tracker}")
    ours, ilp = Row(name, asked, "reactivate"), Row(name, asked, "torch: SAC estimator and ILP")
    time, without = (
        Row(name, TIME, "torch: RuntimeEstimator, told of the GPU"),
        Row(name, TIME, "torch: RuntimeEstimator, without a GPU"),
    )
    on_gpu = Row(name, TIME, "reactivate")
    for _ in range(ROUNDS):
        ask(plain, planned, "100%")
        ask(kept, tracked)
        ask(ours, planned, budget)
        with gpu_facts():
            ask(ilp, solved, budget)
            ask(time, timed)
    ask(without, timed_without_facts)
    ask(on_gpu, seconds_of_plan)
    return [plain, kept, ours, ilp, on_gpu, time, without]


def seconds_of_plan(one: Model, row: Row) -> None:
    """Let reactivate estimate the time of a step on a GPU."""
    plan = planned(one, row, "100%", GPU)
    row.answer_bytes = row.plan = None
    row.says = (
        f"{plan.plain.seconds * 1e3:.4f} ms, of which {plan.plain.collective_seconds * 1e3:.4f} ms in collectives"
    )


# -- what ranks of gloo take ------------------------------------------------------------------------------------------


def selective(module: Any, calls: list[tuple[str, int]]) -> None:
    """Let torch's selective checkpoint save those calls of a module that the ILP wants saved."""
    from torch.distributed._tools.sac_estimator import OPS_TO_ALWAYS_SKIP

    def contexts() -> Any:
        seen: Counter[bool] = Counter()  # in the forward, and in the recomputation

        def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            if op in OPS_TO_ALWAYS_SKIP:
                return CheckpointPolicy.PREFER_RECOMPUTE
            name, is_saved = calls[seen[context.is_recompute]]
            seen[context.is_recompute] += 1
            found = op._overloadpacket.__name__
            assert found == name, f"the step calls {found} where the estimator has seen {name}"
            return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(policy)

    forward = module.forward
    module.forward = lambda *args: checkpoint(forward, *args, use_reentrant=False, context_fn=contexts)


def measured(row: Row) -> int:
    """Return what this rank takes with an answer: what is there all the time, and the peak of the step beside that."""
    model, batch = MODELS[row.model].make(), cases.batch()
    if row.plan is not None:
        reactivate.apply(model, reactivate.Plan.from_json(row.plan))
    for path, calls in (row.save or {}).items():
        selective(model.get_submodule(path), calls)

    def step() -> None:
        loss = model(*batch)
        loss.backward()

    step()
    peaks = [allocated_by_rank(step).own_bytes for _ in range(STEPS)]
    gradients = [item.grad for item in model.parameters()]
    locals_ = [
        getattr(item, "_local_tensor", item) for item in (*model.parameters(), *model.buffers(), *gradients, *batch)
    ]
    standing = {item.untyped_storage()._cdata: item.untyped_storage().nbytes() for item in locals_}
    return min(peaks) + sum(standing.values())


def be_rank(directory: Path, rank: int) -> None:
    """Measure all answers that are plans, and the plain step; the first rank writes them down."""
    dist.init_process_group("gloo", store=dist.FileStore(str(directory / "store"), RANKS), rank=rank, world_size=RANKS)
    rows = [Row(**item) for item in json.loads((directory / "rows").read_text())]
    with torch.backends.mkldnn.flags(enabled=False):
        for row in rows:
            is_plan = row.asked not in (PEAK, TIME)
            if row.asked == TIME or (is_plan and row.plan is None and row.save is None):
                continue
            try:
                row.measured = measured(row)
            except AssertionError as error:  # on all ranks alike
                row.says += f"; cannot be applied: {error}"
    if rank == 0:
        (directory / "rows").write_text(json.dumps([vars(row) for row in rows]))
    dist.barrier()
    dist.destroy_process_group()


def on_ranks(rows: list[Row]) -> list[Row]:
    """Return the rows with what ranks of gloo take."""
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {**os.environ}
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        (directory / "rows").write_text(json.dumps([vars(row) for row in rows]))
        command = [sys.executable, __file__, "--rank", name]
        processes = [subprocess.Popen([*command, str(rank)], env=environment) for rank in range(RANKS)]
        codes = [process.wait() for process in processes]
        assert not any(codes), codes
        return [Row(**item) for item in json.loads((directory / "rows").read_text())]


def of_all_models() -> list[Row]:
    """Return the rows of all models, each of which has a process that asks."""
    with tempfile.TemporaryDirectory() as directory:
        files = [Path(directory, str(number)) for number in range(len(MODELS))]
        commands = [[sys.executable, __file__, "--model", name, str(file)] for name, file in zip(MODELS, files)]
        codes = [process.wait() for process in list(map(subprocess.Popen, commands))]
        assert not any(codes), codes
        return [Row(**item) for file in files for item in json.loads(file.read_text())]


# -- results ----------------------------------------------------------------------------------------------------------


def table(rows: list[Row]) -> Table:
    """Return the table of all answers."""
    title = f"One rank of {RANKS}: answers of one process, and what a rank of gloo takes"
    return Table(title, HEADER, [row.cells for row in rows])


def put_into(page: Path, text: str) -> None:
    """Write the table between the marks of a page."""
    before, rest = page.read_text(encoding="utf-8").split(MARKS[0])
    after = rest.split(MARKS[1])[1]
    page.write_text(f"{before}{MARKS[0]}\n\n{text}\n\n{MARKS[1]}{after}", encoding="utf-8")


def main() -> None:
    """Ask and measure, or be one of the ranks that are measured."""
    torch.set_num_threads(1)
    if sys.argv[1:2] == ["--rank"]:
        be_rank(Path(sys.argv[2]), int(sys.argv[3]))
        return
    if sys.argv[1:2] == ["--model"]:
        with alone():
            rows = answers(sys.argv[2])
        rows = on_ranks(rows)
        Path(sys.argv[3]).write_text(json.dumps([vars(row) for row in rows]))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    given = with_page(parser, None)
    require("pulp", "pwlf")
    rows = of_all_models()
    found = table(rows)
    print(found.with_title())
    if given.out is not None:
        name = f"estimators-cpu-torch{torch.__version__.partition('+')[0]}"
        kept = [{key: value for key, value in vars(row).items() if key != "plan"} for row in rows]
        record = json.dumps({"machine": describe_machine(torch.device("cpu")), "rows": kept}, indent=1)
        write(given.out, name, json=record + "\n", md=found.with_title() + "\n")
    if given.page is not None:
        put_into(given.page, found.to_markdown())


if __name__ == "__main__":
    main()

"""Plans of sharded models that one process makes, without the other ranks and without their devices."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import plan_offline_cases as cases
import pytest
import torch
import torch.distributed as dist
from ranks import errors_of, listed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

import reactivate
from reactivate.errors import UnsupportedError


@pytest.mark.parametrize("name", listed(cases.CASES))
def test_the_plan_of_a_rank_is_equal_to_the_rank(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    assert not errors_of("plan_offline_cases", name, tmp_path_factory)


@contextmanager
def first_of(count: int) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=count)
    try:
        yield
    finally:
        dist.destroy_process_group()


def test_a_step_reaches_tensors_on_the_meta_device() -> None:
    with first_of(2), torch.device("meta"):
        model = cases.sharded(cases.small_gpt)()
        inputs = cases.batch()
        plan = reactivate.plan(model, step=lambda: model(*inputs).backward(), budget="100%", device="cpu")
        same = reactivate.plan(model, inputs, budget="100%", device="cpu")
    least = same.plain.peak_bytes - same.fixed.inputs  # views of what is no argument count, where the step makes them
    assert least <= plan.plain.peak_bytes <= same.plain.peak_bytes


def test_parameters_on_the_host_are_refused() -> None:
    with first_of(2), torch.device("meta"):
        model = cases.sharded(cases.small_gpt, offload_policy=CPUOffloadPolicy())()
        with pytest.raises(UnsupportedError, match="on the host .CPUOffloadPolicy."):
            reactivate.plan(model, cases.batch(), budget="100%", device="cpu")


def test_a_rank_of_a_split_product_takes_its_part_of_the_time() -> None:
    def seconds(ranks: int) -> float:
        with first_of(ranks), torch.device("meta"):
            layers = torch.nn.Sequential(
                torch.nn.Linear(8192, 8192, bias=False), torch.nn.Linear(8192, 8192, bias=False)
            )
            parts = {"0": ColwiseParallel(), "1": RowwiseParallel()}
            parallelize_module(layers, init_device_mesh("cpu", (ranks,)), parts)
            step = reactivate.plan(layers, torch.empty(8192, 8192), budget="100%", device="H100-SXM").plain
        return step.seconds - step.collective_seconds + step.hidden_seconds

    assert 6 < seconds(1) / seconds(8) < 8.5


def test_the_example_plans_each_way_to_shard() -> None:
    script = Path(__file__).parents[2] / "examples" / "sharded_llama.py"
    command = [
        sys.executable,
        str(script),
        *cases.llama.WAYS,
        "--layers",
        "2",
        "--tokens",
        "512",
        "--world",
        "64",
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=script.parent.parent, check=True)
    assert done.stdout.count("Llama fits into") == done.stdout.count("run beside compute") == 3

"""Storages over many steps, over steps of all shapes and limits, and over processes that are killed in one."""

from __future__ import annotations

import copy
import gc
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from offload_cases import Shelf, Stack, same, trained
from test_offload_disk import disk, until, until_empty
from torch import Tensor, nn
from torch._subclasses import FakeTensor

import reactivate
from reactivate import policies
from reactivate.storage import Device, Disk, Host

STORAGES: dict[str, Callable[[Path], Any]] = {
    "device": lambda path: Device(),
    "host": lambda path: Host(least_bytes=0),
    "disk": lambda path: disk(path, last=0),
    "python": lambda path: Shelf(),
}
every_storage = pytest.mark.parametrize("name", STORAGES)


def settled(storage: Any) -> None:
    if isinstance(storage, Disk):
        until_empty(storage)


def bytes_of_tensors() -> int:
    """Bytes of all tensors that Python knows of and that have memory: a fake one of an earlier test has none."""
    gc.collect()
    tensors = [item for item in gc.get_objects() if isinstance(item, Tensor) and not isinstance(item, FakeTensor)]
    return sum({tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}.values())


@pytest.mark.slow
@every_storage
def test_500_steps_hold_as_much_as_the_first(name: str, tmp_path: Path) -> None:
    """Bytes of tensors, of locked memory and of files."""
    torch.manual_seed(1)
    storage, model = STORAGES[name](tmp_path), Stack()
    save = policies.save_ops("gelu", storage=storage)
    reactivate.apply(model, policies.first_match(save, policies.full(inputs=storage)))
    batch = torch.randn(16, 8)

    def step() -> None:
        model(batch).square().mean().backward()
        model.zero_grad()
        settled(storage)

    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that `Host` has nothing to move here
        for number in range(500):
            step()
            if number in (20, 250, 499):
                if found:
                    until(lambda: bytes_of_tensors() <= found[0][0])  # a thread may hold one a little longer
                files = getattr(storage, "file_bytes", 0), len(list(tmp_path.iterdir()))
                found.append((bytes_of_tensors(), *files, getattr(storage, "locked_bytes", 0)))
    assert len({sizes[1:] for sizes in found}) == 1, found
    if name == "disk":
        assert found[0][1] > 0 and storage.traffic.loaded_bytes > 0
    if name == "python":
        assert storage.alive() == 0 and storage.taken > 500


@every_storage
def test_shapes_that_change_every_step(name: str, tmp_path: Path) -> None:
    torch.manual_seed(1)
    storage, model = STORAGES[name](tmp_path), Stack()
    twin = copy.deepcopy(model)
    save = policies.save_ops("linear", storage=storage)
    reactivate.apply(model, policies.first_match(save, policies.full(inputs=storage)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(25):
            batch = torch.randn(*((1 + step * 7 % 13, 2 + step % 3, 8) if step % 2 else (1 + step * 5 % 17, 8)))
            for one in (model, twin):
                one.zero_grad()
                one(batch).square().mean().backward()
            assert same([p.grad for p in model.parameters()], [p.grad for p in twin.parameters()])
            settled(storage)


def test_a_limit_that_only_some_steps_reach(tmp_path: Path) -> None:
    """Over it tensors stay; the next step that is small enough moves all of them again."""
    torch.manual_seed(1)
    storage, model = disk(tmp_path, last=0, limit=6 * 4096), Stack(4)
    twin = copy.deepcopy(model)
    reactivate.apply(model, policies.full(inputs=storage))
    loaded = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for rows in (16, 512, 16, 512, 16):  # an input is a page, or four of them
            before = storage.traffic.loaded_bytes
            batch = torch.randn(rows, 8)
            for one in (model, twin):
                one.zero_grad()
                one(batch).square().mean().backward()
            assert same([p.grad for p in model.parameters()], [p.grad for p in twin.parameters()])
            loaded.append(storage.traffic.loaded_bytes - before)
            until_empty(storage)
            assert storage.file_bytes <= 6 * 4096
    assert len(caught) == 1 and "the limit of 24,576 bytes is reached" in str(caught[0].message)
    assert loaded[1] <= 512 * 8 * 4, "one of four"


TRAINING = """
import os, signal, sys, torch
sys.path[:0] = [sys.argv[2], os.path.dirname(sys.argv[2])]
from offload_cases import Stack, trained
import reactivate
from reactivate import policies
from reactivate.storage import Disk

torch.manual_seed(1)
model, storage = Stack(), Disk(sys.argv[1], least_bytes=0, last=0)
reactivate.apply(model, policies.full(inputs=storage))
layer, calls = model.layers[2], []
def die(*args):
    calls.append(args)
    if len(calls) == 5:  # in the backward of the second step, or in its forward
        os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[3] == "forward":
    layer.register_forward_hook(die)
else:
    layer[3].weight.register_hook(lambda gradient: die(gradient))
trained(model, steps=20)
"""


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_run_that_is_killed_in_a_step_and_a_new_one(where: str, tmp_path: Path) -> None:
    path, tests = tmp_path, str(Path(__file__).parent)
    ended = subprocess.run([sys.executable, "-c", TRAINING, str(path), tests, where], check=False)
    assert ended.returncode == -signal.SIGKILL
    assert list(path.iterdir()) == []
    torch.manual_seed(1)
    model, storage = Stack(), disk(path, last=0)
    expected = trained(copy.deepcopy(model))
    reactivate.apply(model, policies.full(inputs=storage))
    assert same(trained(model), expected) and storage.traffic.moved_bytes > 0


# -- optimizers that look at gradients early -------------------------------------------------------------------------------


def in_hooks(model: nn.Module) -> None:
    """Step as soon as a gradient is there, and free it."""
    for parameter in model.parameters():
        optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)

        def step(parameter: Tensor, optimizer: Any = optimizer) -> None:
            optimizer.step()
            parameter.grad = None

        parameter.register_post_accumulate_grad_hook(step)


def in_backward(model: nn.Module) -> None:
    """Step in the backward, as torch.distributed does it."""
    from torch.distributed.optim import _apply_optimizer_in_backward

    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1, "momentum": 0.9})


@every_storage
@pytest.mark.parametrize("attach", [in_hooks, in_backward])
def test_optimizers_that_step_in_the_backward(attach: Any, name: str, tmp_path: Path) -> None:
    torch.manual_seed(1)
    storage, model = STORAGES[name](tmp_path), Stack()
    twin = copy.deepcopy(model)
    save = policies.save_ops("gelu", storage=storage)
    reactivate.apply(model, policies.first_match(save, policies.full(inputs=storage)))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for one in (model, twin):
            attach(one)
            torch.manual_seed(2)
            for _ in range(4):
                one(torch.randn(16, 8)).square().mean().backward()
    assert same(list(model.parameters()), list(twin.parameters()))
    assert not any(map(torch.equal, before, model.parameters()))
    assert all(parameter.grad is None for parameter in model.parameters())


ZERO = """
import copy, os, sys, torch
import torch.distributed as dist
from datetime import timedelta
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
rank, path, tests = int(sys.argv[1]), sys.argv[2], sys.argv[3]
sys.path[:0] = [tests, os.path.dirname(tests)]
from offload_cases import Stack
import reactivate
from reactivate import policies
from reactivate.storage import Disk

dist.init_process_group("gloo", init_method=f"file://{path}/store", rank=rank, world_size=2, timeout=timedelta(seconds=60))
found = []
for storage in (None, Disk(path, least_bytes=0, last=0)):
    torch.manual_seed(1)
    model = Stack()
    if storage is not None:
        reactivate.apply(model, policies.full(inputs=storage))
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(
        wrapped.parameters(), torch.optim.AdamW, lr=0.1, parameters_as_bucket_view=True
    )
    torch.manual_seed(2 + rank)
    for _ in range(4):
        wrapped(torch.randn(16, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    found.append([parameter.detach().clone() for parameter in model.parameters()])
assert all(map(torch.equal, *found)), "other parameters than the plain model's"
assert storage.traffic.moved == 16, storage.traffic
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_optimizer_states_that_two_processes_share(tmp_path: Path) -> None:
    command = [sys.executable, "-c", ZERO]
    tests = str(Path(__file__).parent)
    processes = [
        subprocess.Popen([*command, str(rank), str(tmp_path), tests], stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        errors = [process.communicate(timeout=180)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(errors)[-3000:]

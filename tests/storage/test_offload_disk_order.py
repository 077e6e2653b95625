"""The order in which a disk's tensors come back: groups, and reads of several threads."""

from __future__ import annotations

import copy
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from offload_cases import Stack, same
from test_offload_disk import arrived, disk, filled

import reactivate
from reactivate import policies
from reactivate.storage import spool
from reactivate.storage.disk_file import DiskFile


def test_groups_are_read_in_the_order_of_a_pipeline(tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = Stack()
    twin = copy.deepcopy(model)
    storage = disk(tmp_path, last=0)
    reactivate.apply(model, policies.full(inputs=storage))
    batches, losses = [torch.randn(4, 8) for _ in range(3)], []
    for number, batch in enumerate(batches):
        with storage.group(number):
            losses.append(model(batch).square().mean())
        twin(batch).square().mean().backward()
    for number, loss in enumerate(losses):
        storage.prefetch(number)
        loss.backward()
    assert same([p.grad for p in model.parameters()], [p.grad for p in twin.parameters()])
    assert storage.traffic.loaded_bytes > 0


def test_prefetch_starts_the_last_of_its_group_and_reading_goes_on_in_it(tmp_path: Path, monkeypatch: Any) -> None:
    storage = disk(tmp_path, last=0, ahead=1)
    groups = []
    for number in range(2):
        with storage.group(number):
            groups.append(filled(storage, 4))
    later = arrived(storage)
    started: list[Any] = []
    monkeypatch.setattr(
        spool.Spool, "read", lambda self, *args, read=spool.Spool.read: started.append(args[1]) or read(self, *args)
    )
    handles, expected = groups[0]
    storage.prefetch(0)
    assert started == [handles[3].piece._area]
    for number in (3, 2, 1, 0):
        assert torch.equal(storage.load(handles[number]), expected[number])
    assert started == [handles[number].piece._area for number in (3, 2, 1, 0)], "and nothing of the other group"
    storage.prefetch("no such group")
    assert len(started) == 4
    del later


def test_a_group_for_each_step_leaves_nothing(tmp_path: Path) -> None:
    storage = disk(tmp_path, last=0)
    for step in range(20):
        with storage.group(step):
            handles, expected = filled(storage, 3, 64)
        storage.prefetch(step)
        assert all(torch.equal(storage.load(one), other) for one, other in zip(handles[::-1], expected[::-1]))
        del handles
    assert storage._mover.order.of_this_thread() == []


def test_a_group_is_that_of_its_thread(tmp_path: Path) -> None:
    storage = disk(tmp_path, last=0)
    seen: list[Any] = []
    with storage.group("mine"):
        thread = threading.Thread(target=lambda: seen.append(storage._mover.order.series(torch.device("cpu")).group))
        thread.start()
        thread.join()
        seen.append(storage._mover.order.series(torch.device("cpu")).group)
    assert seen == [None, "mine"]


def test_reads_of_several_threads_overlap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = disk(tmp_path, last=0, ahead=0)
    handles, expected = filled(storage, 2)
    later = arrived(storage)
    both, read = threading.Barrier(2, timeout=30), DiskFile.read

    def together(*args: Any) -> None:
        both.wait()
        read(*args)

    monkeypatch.setattr(DiskFile, "read", together)
    found: dict[int, Any] = {}
    threads = [
        threading.Thread(target=lambda number=number: found.update({number: storage.load(handles[number])}))
        for number in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(found[number], expected[number]) for number in range(2))
    assert storage.traffic.loaded_bytes == 2 * expected[0].nbytes
    del later


def test_two_threads_that_read_one_tensor_read_it_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = disk(tmp_path, last=0, ahead=0)
    handles, expected = filled(storage, 1)
    later = arrived(storage)
    gate, entered, read, count = threading.Event(), threading.Barrier(3, timeout=30), DiskFile.read, []

    def late(*args: Any) -> None:
        count.append(args)
        gate.wait(30)
        read(*args)

    def load() -> None:
        entered.wait()
        found.append(storage.load(handles[0]))

    monkeypatch.setattr(DiskFile, "read", late)
    found: list[Any] = []
    threads = [threading.Thread(target=load) for _ in range(2)]
    for thread in threads:
        thread.start()
    entered.wait()
    gate.set()
    for thread in threads:
        thread.join()
    assert all(torch.equal(tensor, expected[0]) for tensor in found) and len(found) == 2
    assert len(count) == 1
    del later

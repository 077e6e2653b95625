"""`Disk`: tensors that are kept in a file come back bit for bit, or an error says that they cannot."""

from __future__ import annotations

import copy
import os
import pickle
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from offload_cases import Stack, block, same, trained
from oracle import assert_bitwise
from surroundings import Failure
from torch import Tensor, nn

import reactivate
from reactivate import policies
from reactivate._storing.inputs import store_for
from reactivate.errors import UsageError
from reactivate.storage import Disk, Host, spool
from reactivate.storage.areas import Areas
from reactivate.storage.disk_file import DiskFile
from reactivate.storage.pieces import LAST
from reactivate.storage.samples import Pair


def disk(path: Path, **options: Any) -> Disk:
    return Disk(path, **{"least_bytes": 0, **options})


def filled(storage: Disk, count: int = 6, elements: int = 4096) -> tuple[list[Any], list[Tensor]]:
    """Handles of tensors that nobody else has, and what they were."""
    expected = [torch.randn(elements) for _ in range(count)]
    return [storage.save(tensor.clone()) for tensor in expected], expected


def arrived(storage: Disk) -> list[Any]:
    """Wait until what was taken in is in the file; handles to hold meanwhile."""
    return [storage.save(torch.zeros(16)) for _ in range(spool.WRITING + storage.last + 1)]


def until(condition: Callable[[], bool]) -> None:
    """Wait for threads of the storage that still hold a tensor."""
    end = time.monotonic() + 30
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    assert condition()


def until_empty(storage: Disk) -> None:
    until(lambda: storage.used_bytes == 0)


POLICIES: dict[str, Callable[[Disk], Any]] = {
    "full": lambda storage: policies.full(inputs=storage),
    "every other": lambda storage: policies.recompute_every(2, inputs=storage),
    "ops": lambda storage: policies.first_match(policies.save_ops("linear", storage=storage), policies.full()),
    "both": lambda storage: policies.first_match(
        policies.save_ops("linear", storage=storage), policies.full(inputs=storage)
    ),
}


@pytest.mark.parametrize("options", [{}, {"last": 0, "ahead": 0}, {"last": 0, "ahead": 3}, {"last": 2, "ahead": 2}])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("writing", [0, spool.WRITING])  # none: each is in the file when the next one comes
def test_training_is_bitwise_the_plain_one(
    policy: str, options: Any, writing: int, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(spool, "WRITING", writing)
    torch.manual_seed(1)
    model = Stack(8)
    expected = trained(copy.deepcopy(model))
    storage = disk(tmp_path, **options)
    reactivate.apply(model, POLICIES[policy](storage))
    assert same(trained(model), expected)
    assert storage.traffic.moved_bytes > 0
    assert storage.traffic.loaded_bytes > 0 or writing
    until_empty(storage)


def test_the_last_stays_in_memory_and_small_ones_do(tmp_path: Path) -> None:
    storage = disk(tmp_path, last=2, least_bytes=64)
    handles, expected = filled(storage, 6)
    assert storage.used_bytes == 4 * 4096 * 4
    small = torch.zeros(8)
    assert storage.save(small) is small
    for handle, tensor in reversed(list(zip(handles, expected))):
        assert_bitwise(tensor, storage.load(handle), "a tensor")
    assert storage.traffic.loaded_bytes <= 4 * 4096 * 4
    assert storage.traffic.stayed == {"smaller than 64 bytes": 1, LAST: 2}
    assert storage.traffic.moved == 4 and storage.traffic.moved_bytes == 4 * 4096 * 4


def test_reading_one_starts_the_one_before(tmp_path: Path, monkeypatch: Any) -> None:
    storage = disk(tmp_path, last=0, ahead=2)
    handles, _ = filled(storage, 6)
    later = arrived(storage)
    order: list[int] = []
    numbers = {id(handle.piece): number for number, handle in enumerate(handles)}
    start_back = spool.DiskPiece.start_back

    def noted(piece: Any) -> None:
        if piece._coming is None:
            order.append(numbers.get(id(piece), -1))
        start_back(piece)

    monkeypatch.setattr(spool.DiskPiece, "start_back", noted)
    storage.load(handles[5])
    assert order == [5, 4, 3]
    storage.load(handles[4])
    assert order == [5, 4, 3, 2]
    del later


def test_memory_is_held_until_it_is_written_and_no_longer(tmp_path: Path, monkeypatch: Any) -> None:
    go, pwrite = threading.Event(), os.pwrite

    def slow(*args: Any) -> int:
        assert go.wait(60)
        return pwrite(*args)

    monkeypatch.setattr(os, "pwrite", slow)
    storage = disk(tmp_path, last=0)
    tensor = torch.randn(4096)
    expected, memory = tensor.clone(), tensor.untyped_storage()._weak_ref()
    handle = storage.save(tensor)
    del tensor
    assert not torch.UntypedStorage._expired(memory)
    assert_bitwise(expected, storage.load(handle), "a tensor that is being written")
    assert storage.traffic.loaded_bytes == 0
    go.set()
    later = arrived(storage)
    assert torch.UntypedStorage._expired(memory)
    assert_bitwise(expected, storage.load(handle), "a tensor that is written")
    del later


def test_a_slow_disk_holds_the_forward_up(tmp_path: Path, monkeypatch: Any) -> None:
    """Otherwise all that was to leave the memory would wait in it."""
    pwrite, in_memory = os.pwrite, []

    def slow(*args: Any) -> int:
        time.sleep(0.01)
        return pwrite(*args)

    monkeypatch.setattr(os, "pwrite", slow)
    storage = disk(tmp_path, last=1)
    handles = []
    for _ in range(20):
        handles.append(storage.save(torch.randn(4096)))
        in_memory.append(sum(handle.piece._run is not None for handle in handles))
    assert max(in_memory) <= 1 + spool.WRITING


def test_a_wait_for_the_disk_keeps_no_other_thread(tmp_path: Path, monkeypatch: Any) -> None:
    """Another thread can read what it has in memory while this one waits for its writes."""
    go, pwrite, waits = threading.Event(), os.pwrite, spool.DiskPiece.wait

    def slow(*args: Any) -> int:
        assert go.wait(60)
        return pwrite(*args)

    def waiting(piece: spool.DiskPiece) -> None:
        has_begun.set()
        waits(piece)

    has_begun = threading.Event()
    monkeypatch.setattr(os, "pwrite", slow)
    monkeypatch.setattr(spool.DiskPiece, "wait", waiting)
    storage = disk(tmp_path, last=1)
    expected = torch.randn(4096)
    handle = storage.save(expected.clone())
    found: list[tuple[list[Any], list[Tensor]]] = []
    other = threading.Thread(target=lambda: found.append(filled(storage)))
    other.start()
    assert has_begun.wait(60)
    mover = storage._mover
    assert mover.lock.acquire(blocking=False)
    mover.lock.release()
    assert_bitwise(expected, storage.load(handle), "in memory")
    go.set()
    other.join()
    for theirs, tensor in zip(*found[0], strict=True):
        assert_bitwise(tensor, storage.load(theirs), "of the other thread")


def test_a_tensor_that_is_modified_before_it_is_written_is_refused(tmp_path: Path, monkeypatch: Any) -> None:
    go, pwrite = threading.Event(), os.pwrite

    def slow(*args: Any) -> int:
        assert go.wait(60)
        return pwrite(*args)

    monkeypatch.setattr(os, "pwrite", slow)
    storage = disk(tmp_path, last=1)
    while_written, while_waiting = torch.randn(64), torch.randn(64)
    handles = [storage.save(while_written), storage.save(while_waiting)]
    while_written.zero_()
    while_waiting.zero_()
    go.set()
    later = arrived(storage)
    for handle in handles:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            storage.load(handle)
    del later


def test_a_tensor_that_is_modified_after_it_is_written_is_what_it_was(tmp_path: Path) -> None:
    storage = disk(tmp_path)
    tensor = torch.randn(64)
    expected = tensor.clone()
    handle = storage.save(tensor)
    later = arrived(storage)
    tensor.zero_()
    assert_bitwise(expected, storage.load(handle), "a tensor")
    del later


def test_only_the_thread_that_took_a_tensor_in_lets_its_memory_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another one may find the write done and the version unchanged while an op is modifying the tensor."""
    storage = disk(tmp_path, last=0)
    gate, write = threading.Event(), DiskFile.write

    def when_told(*args: Any) -> None:
        gate.wait(60)
        write(*args)

    monkeypatch.setattr(DiskFile, "write", when_told)
    handle = storage.save(torch.randn(64))
    gate.set()
    handle.piece._write.done.result()
    thread = threading.Thread(target=arrived, args=(storage,))
    thread.start()
    thread.join()
    assert handle.piece._run is not None
    later = arrived(storage)
    assert handle.piece._run is None
    del later


def test_many_steps_grow_nothing(tmp_path: Path) -> None:
    torch.manual_seed(1)
    model, storage = Stack(), disk(tmp_path)
    reactivate.apply(model, policies.full(inputs=storage))
    sizes = []
    for _ in range(200):
        model(torch.randn(16, 8)).square().mean().backward()
        until_empty(storage)
        sizes.append((storage.file_bytes, len(storage._mover._pieces), len(storage._mover.order.of_this_thread())))
    assert len(set(sizes[1:])) == 1, sizes[-1]
    assert sizes[-1][1:] == (0, 0)


def test_500_equal_tensors_one_after_the_other_need_one_place(tmp_path: Path) -> None:
    storage = disk(tmp_path, last=0)
    sizes = set()
    for _ in range(500):
        handles, _ = filled(storage, 3, 1024)
        later = arrived(storage)
        del handles, later
        until_empty(storage)
        sizes.add(storage.file_bytes)
    assert sizes == {6 * 4096}


def test_shapes_that_change_every_step(tmp_path: Path) -> None:
    torch.manual_seed(1)
    model, storage = Stack(), disk(tmp_path, last=0)
    twin = copy.deepcopy(model)
    reactivate.apply(model, policies.full(inputs=storage))
    batches = [torch.randn(1 + (step * 37) % 101, 8) for step in range(40)]
    sizes = []
    for batch in batches:
        for one in (model, twin):
            one(batch).square().mean().backward()
        until_empty(storage)
        sizes.append(storage.file_bytes)
    assert same([p.grad for p in model.parameters()], [p.grad for p in twin.parameters()])
    assert max(sizes) == 4 * 4096  # a region's input is a page at most


def test_areas_are_reused_and_joined() -> None:
    areas = Areas(10 * 4096)
    some = [areas.take(4096) for _ in range(10)]
    assert [area.start for area in some if area] == [4096 * number for number in range(10)]
    assert areas.take(1) is None and areas.used_bytes == 10 * 4096
    del some[2:4], some[4:5]  # 2, 3 and 6
    smallest = areas.take(100)
    assert smallest is not None and smallest.start == 6 * 4096
    joined = areas.take(2 * 4096)
    assert joined is not None and joined.start == 2 * 4096
    some.clear()
    del smallest, joined
    assert areas.used_bytes == 0 and areas._free == [] and areas._end == 0


def test_the_file_goes_with_the_storage_and_not_before(tmp_path: Path) -> None:
    storage = disk(tmp_path)
    assert storage.file_bytes == 0 and storage._mover.file is None
    handles, expected = filled(storage)
    load, file = storage.load, storage._mover.file._file
    del storage
    assert_bitwise(expected[0], load(handles[0]), "a tensor")
    assert not file.closed
    del load, handles
    until(lambda: file.closed)


def test_an_exception_leaves_nothing(tmp_path: Path) -> None:
    storage = disk(tmp_path, last=0)
    inner = reactivate.checkpoint(block(), inputs=storage)

    def fails(x: Tensor) -> Tensor:
        raise Failure

    outer = reactivate.checkpoint(fails, inputs=storage)
    with pytest.raises(Failure):
        outer(inner(torch.randn(16, 8, requires_grad=True) * 2).sin())
    later = arrived(storage)
    del later
    until_empty(storage)


def test_two_backwards_and_a_double_backward(tmp_path: Path) -> None:
    def run(wrap: Any, settle: Any) -> list[Tensor]:
        torch.manual_seed(0)
        model = block()
        x = torch.randn(4, 8, requires_grad=True)
        y = wrap(model)(x.sin()).square().sum()
        later = settle()
        first = torch.autograd.grad(y, [x, *model.parameters()], retain_graph=True)
        (again,) = torch.autograd.grad(y, x, create_graph=True)
        del later
        return [*first, again, *torch.autograd.grad(again.square().sum(), [x, *model.parameters()], allow_unused=True)]

    storage = disk(tmp_path)
    found = run(lambda fn: reactivate.checkpoint(fn, inputs=storage), lambda: arrived(storage))
    assert same(found, run(lambda fn: fn, lambda: None))
    assert storage.traffic.loaded_bytes >= 2 * 4 * 8 * 4
    until_empty(storage)


def test_threads(tmp_path: Path) -> None:
    torch.manual_seed(1)
    models = [Stack() for _ in range(4)]
    batches = [torch.randn(5 + number, 8) for number in range(4)]
    storage = disk(tmp_path, last=0)
    twins = copy.deepcopy(models)
    for model in models:
        reactivate.apply(model, POLICIES["both"](storage))
    errors: list[BaseException] = []

    def work(model: nn.Module, batch: Tensor) -> None:
        try:
            for _ in range(10):
                model(batch).square().mean().backward()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=pair) for pair in zip(models, batches)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    for model, twin, batch in zip(models, twins, batches):
        work(twin, batch)
        assert same([p.grad for p in model.parameters()], [p.grad for p in twin.parameters()])


def test_copies_are_equal_and_have_files_of_their_own(tmp_path: Path) -> None:
    storage = disk(tmp_path, limit=10**6, ahead=2, last=3)
    handles, _ = filled(storage)
    for twin in (copy.deepcopy(storage), pickle.loads(pickle.dumps(storage))):
        assert twin == storage and hash(twin) == hash(storage) and repr(twin) == repr(storage)
        assert twin.file_bytes == 0
        more, _ = filled(twin)
        assert twin.file_bytes > 0
        del more
    assert repr(storage) == f"Disk(path={str(tmp_path)!r}, limit=1000000, least_bytes=0, ahead=2, last=3)"
    del handles


def test_what_is_no_directory_is_refused_and_none_is_made(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="takes the path of a directory, and was given 7"):
        Disk(7)
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="takes the path of a directory, and '.*file' is none"):
        Disk(tmp_path / "file")
    mistyped = Disk(tmp_path / "scrtach", least_bytes=0, last=0)  # which may be there on the machine that a plan is for
    region = reactivate.checkpoint(block(), inputs=mistyped)
    with pytest.raises(
        UsageError, match=r"a directory that is there, and there is none at .*scrtach\. Make it, or correct"
    ):
        region(torch.randn(4, 8, requires_grad=True) * 2)
    assert not (tmp_path / "scrtach").exists()


@pytest.mark.parametrize("make", [Host, lambda **sizes: Disk("unused", **sizes)])
def test_sizes_and_numbers(make: Any) -> None:
    assert make(limit="1GiB", least_bytes="1.5 kB") == make(limit=2**30, least_bytes=1500)
    assert make(limit="1GiB").allowed_bytes == 2**30 and make(limit="1GiB").limit == 2**30
    for wrong in ({"limit": 1e9}, {"limit": -1}, {"limit": "1 much"}, {"limit": True}, {"least_bytes": None}):
        with pytest.raises(UsageError, match=r"\((limit|least_bytes)=\.\.\.\) takes a size: an int of bytes .* got"):
            make(**wrong)
    for wrong in ({"last": -1}, {"ahead": "2"}, {"last": None}):
        with pytest.raises(UsageError, match=r"\((last|ahead)=\.\.\.\) takes a number, 0 or more; got"):
            make(**wrong)


def test_fake_tensors_have_no_bytes_to_write(tmp_path: Path) -> None:
    storage = disk(tmp_path, last=0)
    with torch._subclasses.FakeTensorMode():
        tensor = torch.empty(4, 6).t()
        found = storage.load(storage.save(tensor))
    assert (found.size(), found.stride()) == (tensor.size(), tensor.stride()) and type(found) is type(tensor)
    assert list(tmp_path.iterdir()) == []


def test_no_warning_where_nothing_is_wrong(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        handles, _ = filled(disk(tmp_path))
    del handles


def test_the_parts_of_a_wrapper_are_not_held_beside_the_storage(tmp_path: Path) -> None:
    storage = disk(tmp_path, last=0)
    parts = torch.randn(4, 6), torch.randn(4, 6)
    memories = [part.untyped_storage()._weak_ref() for part in parts]
    expected = [part.clone() for part in parts]
    wrapper = Pair(*parts)
    wrapper.note = "set"  # type: ignore[attr-defined]
    kept = store_for(storage, "region")(wrapper, "wrapper")
    del parts, wrapper
    later = arrived(storage)
    assert kept is not None and all(torch.UntypedStorage._expired(memory) for memory in memories)
    found: Any = kept.rebuild({})
    assert type(found) is Pair and found.note == "set" and same([found.first, found.second], expected)
    del later


@pytest.mark.parametrize("policy", [None, "linear"])
@pytest.mark.parametrize("determinism", ["first", "metadata"])
def test_jagged_tensors(determinism: str, policy: str | None, tmp_path: Path) -> None:
    """Regions combine what is brought back with tensors that share its ragged dimension."""
    offsets = torch.tensor([0, 2, 5, 10])
    linear, values = nn.Linear(8, 8), torch.randn(10, 8)

    def run(wrap: Any) -> list[Any]:
        linear.zero_grad()
        jagged = torch.nested.nested_tensor_from_jagged(values, offsets)
        scale = jagged.exp()
        h = linear(jagged)
        for _ in range(3):
            h = wrap(lambda x: linear(x.sin() * scale).cos() * x)(h)
        h.values().sum().backward()
        return [parameter.grad.clone() for parameter in linear.parameters()]

    storage = disk(tmp_path, last=0)
    saved = None if policy is None else policies.save_ops(policy, storage=storage)
    options = {"policy": saved, "inputs": storage, "check": determinism}
    assert same(run(lambda fn: reactivate.checkpoint(fn, **options)), run(lambda fn: fn))
    assert storage.traffic.loaded_bytes > 0


def test_results_without_memory_stay(tmp_path: Path) -> None:
    """A probe on the meta device computes nothing but shapes."""
    linear, storage = nn.Linear(4, 4), Disk(tmp_path, least_bytes=0, last=0)

    def forward(x: Tensor) -> Tensor:
        shape = torch.matmul(torch.empty(3, 4, device="meta"), torch.empty(4, 4, device="meta")).shape
        return linear(x).view(shape).sin()

    checkpointed = reactivate.checkpoint(forward, policy=policies.save_ops("matmul", storage=storage))
    x = torch.ones(3, 4)
    (plain,) = torch.autograd.grad(forward(x).sum(), linear.weight)
    (ours,) = torch.autograd.grad(checkpointed(x).sum(), linear.weight)
    assert torch.equal(plain, ours)

"""`Disk`: tensors that are kept in a file come back bit for bit, or an error says that they cannot."""

from __future__ import annotations

import copy
import errno
import fcntl
import os
import pickle
import signal
import stat
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import assert_bitwise
from surroundings import Failure
from test_offload_inputs import Stack, block, same, trained
from torch import Tensor, nn

import reactivate
from reactivate import policies
from reactivate.errors import StorageError, UsageError
from reactivate.storage import Disk, spool
from reactivate.storage.areas import Areas


def disk(path: Path, **options: Any) -> Disk:
    return Disk(path, **{"least_bytes": 0, **options})


def filled(storage: Disk, count: int = 6, elements: int = 4096) -> tuple[list[Any], list[Tensor]]:
    """Handles of tensors that nobody else has, and what they were."""
    expected = [torch.randn(elements) for _ in range(count)]
    return [storage.save(tensor.clone()) for tensor in expected], expected


def arrived(storage: Disk) -> list[Any]:
    """Wait until what was taken in is in the file; handles to hold meanwhile."""
    return [storage.save(torch.zeros(16)) for _ in range(spool._WRITING + storage.last + 1)]


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
def test_training_is_bitwise_the_plain_one(policy: str, options: Any, tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = Stack()
    expected = trained(copy.deepcopy(model))
    storage = disk(tmp_path, **options)
    reactivate.apply(model, POLICIES[policy](storage))
    assert same(trained(model), expected)
    assert storage.traffic.moved_bytes > 0 and storage.traffic.loaded_bytes > 0
    assert storage.used_bytes == 0


def test_the_last_stays_in_memory_and_small_ones_do(tmp_path: Path) -> None:
    storage = disk(tmp_path, last=2, least_bytes=64)
    handles, expected = filled(storage, 6)
    assert storage.used_bytes == 4 * 4096 * 4
    small = torch.zeros(8)
    assert storage.save(small) is small
    for handle, tensor in reversed(list(zip(handles, expected))):
        assert_bitwise(tensor, storage.load(handle), "a tensor")
    assert storage.traffic.loaded_bytes <= 4 * 4096 * 4
    assert storage.traffic.stayed == {"smaller than 64 bytes": 1}


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
    assert max(in_memory) <= 1 + spool._WRITING


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


def test_only_the_thread_that_took_a_tensor_in_lets_its_memory_go(tmp_path: Path) -> None:
    """Another one may find the write done and the version unchanged while an op is modifying the tensor."""
    storage = disk(tmp_path, last=0)
    handle = storage.save(torch.randn(64))
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
        sizes.append((storage.file_bytes, storage.used_bytes, len(storage._spool._pieces), _pieces_of(storage)))
    assert len(set(sizes[1:])) == 1, sizes[-1]
    assert sizes[-1][1:3] == (0, 0)


def _pieces_of(storage: Disk) -> int:
    return len(storage._spool._series().pieces)


def test_500_equal_tensors_one_after_the_other_need_one_place(tmp_path: Path) -> None:
    storage = disk(tmp_path, last=0)
    sizes = set()
    for _ in range(500):
        handles, _ = filled(storage, 3, 1024)
        later = arrived(storage)
        del handles, later
        sizes.add(storage.file_bytes)
    assert max(sizes) <= 12 * 4096


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
        sizes.append(storage.file_bytes)
    assert same([p.grad for p in model.parameters()], [p.grad for p in twin.parameters()])
    assert storage.used_bytes == 0 and max(sizes) <= 5 * 4096  # four regions of at most a page, and one on its way


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


def test_the_limit_is_reached_in_the_middle_of_a_step(tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = Stack(8)
    expected = trained(copy.deepcopy(model))
    storage = disk(tmp_path, last=0, limit=3 * 4096)
    reactivate.apply(model, policies.full(inputs=storage))
    with pytest.warns(UserWarning, match="the limit of 12,288 bytes is reached, and tensors stay") as caught:
        assert same(trained(model), expected)
    assert len(caught) == 1
    assert storage.file_bytes == 3 * 4096 and storage.traffic.loaded_bytes > 0


def _full(*args: Any) -> int:
    raise OSError(errno.ENOSPC, "No space left on device")


def _nothing(*args: Any) -> int:
    return 0


@pytest.mark.parametrize("name", ["pwrite", "posix_fallocate", "mkdir"])
def test_a_full_disk(name: str, tmp_path: Path, monkeypatch: Any) -> None:
    torch.manual_seed(1)
    model = Stack()
    expected = trained(copy.deepcopy(model))
    storage = disk(tmp_path)
    reactivate.apply(model, policies.full(inputs=storage))
    monkeypatch.setattr(os, name, _full)
    with pytest.warns(UserWarning, match="No space left on device.* tensors stay in memory") as caught:
        assert same(trained(model), expected)
    assert len(caught) == 1 and storage.traffic.loaded_bytes == 0 and storage.used_bytes == 0


def test_a_disk_that_takes_nothing_more(tmp_path: Path, monkeypatch: Any) -> None:
    storage = disk(tmp_path)
    monkeypatch.setattr(os, "pwrite", _nothing)
    with pytest.warns(UserWarning, match="0 of 16,384 bytes were moved"):
        handles, expected = filled(storage)
        later = arrived(storage)
    for handle, tensor in zip(handles, expected):
        assert_bitwise(tensor, storage.load(handle), "a tensor")
    del later


def test_short_transfers_go_on_where_they_ended(tmp_path: Path, monkeypatch: Any) -> None:
    pwrite, preadv = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda file, memory, place: pwrite(file, memory[:1000], place))
    monkeypatch.setattr(os, "preadv", lambda file, memories, place: preadv(file, [memories[0][:999]], place))
    storage = disk(tmp_path)
    handles, expected = filled(storage)
    later = arrived(storage)
    for handle, tensor in zip(handles, expected):
        assert_bitwise(tensor, storage.load(handle), "a tensor")
    assert storage.traffic.loaded_bytes == 6 * 4096 * 4
    del later


def _broken(*args: Any) -> int:
    raise OSError(errno.EIO, "Input/output error")


@pytest.mark.parametrize(("read", "message"), [(_broken, "Input/output error"), (_nothing, "0 of .* bytes were moved")])
def test_a_read_that_fails_is_an_error(read: Any, message: str, tmp_path: Path, monkeypatch: Any) -> None:
    model, storage = Stack(), disk(tmp_path, last=0)
    reactivate.apply(model, policies.full(inputs=storage))
    out = model(torch.randn(16, 8)).sum()
    later = arrived(storage)
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", read)
    with pytest.raises(StorageError, match=f"could not be read from {tmp_path}.*{message}"):
        out.backward()
    monkeypatch.setattr(os, "preadv", preadv)
    del out, later
    assert storage.used_bytes == 0
    model(torch.randn(16, 8)).sum().backward()  # and the storage works on


def test_a_file_that_somebody_cuts_is_an_error(tmp_path: Path) -> None:
    storage = disk(tmp_path)
    handles, _ = filled(storage)
    later = arrived(storage)
    os.truncate(os.path.join(str(storage.directory), "tensors"), 4096)
    with pytest.raises(StorageError, match="0 of 16,384 bytes"):
        storage.load(handles[3])
    with pytest.raises(StorageError, match="4,096 of 16,384 bytes"):
        storage.load(handles[0])
    del later


def test_permissions(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        storage = disk(tmp_path, last=0)
        handle = storage.save(torch.randn(64))
    finally:
        os.umask(before)
    directory = Path(str(storage.directory))
    assert directory.parent == tmp_path and directory.name.startswith(f"reactivate-{os.getpid()}-")
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert [stat.S_IMODE(file.stat().st_mode) for file in directory.iterdir()] == [0o600]
    del handle


def test_the_directory_goes_with_the_storage_and_not_before(tmp_path: Path) -> None:
    storage = disk(tmp_path)
    assert list(tmp_path.iterdir()) == [] and storage.directory is None
    handles, expected = filled(storage)
    load = storage.load
    assert len(list(tmp_path.iterdir())) == 1
    del storage
    assert_bitwise(expected[0], load(handles[0]), "a tensor")
    del load, handles
    _until(lambda: list(tmp_path.iterdir()) == [])


def _until(condition: Callable[[], bool]) -> None:
    """Wait for threads of the storage that still hold a tensor."""
    end = time.monotonic() + 30
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    assert condition()


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
    _until(lambda: storage.used_bytes == 0)


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
    assert storage.used_bytes == 0


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
        assert twin.directory is None
        more, _ = filled(twin)
        assert twin.directory != storage.directory
        del more
    assert repr(storage) == f"Disk(path={str(tmp_path)!r}, limit=1000000, least_bytes=0, ahead=2, last=3)"
    del handles


def test_what_is_no_path_is_refused() -> None:
    with pytest.raises(UsageError, match="takes the path of a directory, and was given 7"):
        Disk(7)


def test_fake_tensors_have_no_bytes_to_write(tmp_path: Path) -> None:
    storage = disk(tmp_path, last=0)
    with torch._subclasses.FakeTensorMode():
        tensor = torch.empty(4, 6).t()
        found = storage.load(storage.save(tensor))
    assert (found.size(), found.stride()) == (tensor.size(), tensor.stride()) and type(found) is type(tensor)
    assert list(tmp_path.iterdir()) == []


def locked(directory: Path) -> bool:
    with open(directory / "tensors", "r+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
        return False


WORKER = """
import sys, torch
from reactivate.storage import Disk

storage = Disk(sys.argv[1], least_bytes=0, last=0)
handles = [storage.save(torch.randn(4096)) for _ in range(4)]
print(storage.directory, flush=True)
sys.stdin.read()
"""


def started(path: Path) -> tuple[subprocess.Popen[str], Path]:
    worker = subprocess.Popen(
        [sys.executable, "-c", WORKER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert worker.stdout is not None
    return worker, Path(worker.stdout.readline().strip())


def test_what_a_killed_process_leaves_goes_at_the_next_start_and_a_live_ones_stays(tmp_path: Path) -> None:
    killed, first = started(tmp_path)
    alive, second = started(tmp_path)
    (tmp_path / "reactivate-notes").write_text("the user's")
    (tmp_path / "other").mkdir()
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    assert first.is_dir() and (first / "tensors").stat().st_size >= 4 * 4096 * 4
    storage = disk(tmp_path, last=0)
    handles, _ = filled(storage)
    assert not first.exists()
    assert second.is_dir() and locked(second)
    assert (tmp_path / "reactivate-notes").exists() and (tmp_path / "other").exists()
    alive.communicate("")  # it ends by itself
    assert alive.returncode == 0 and not second.exists()
    del handles


def test_it_is_the_lock_that_decides_and_no_process_id(tmp_path: Path) -> None:
    """Ids are given again: a directory with the id of a process that lives may be a dead one's."""
    dead = tmp_path / f"reactivate-{os.getpid()}-dead"
    dead.mkdir()
    (dead / "tensors").touch()
    half = tmp_path / "reactivate-1-half"
    half.mkdir()
    storage = disk(tmp_path, last=0)
    handle = storage.save(torch.randn(64))
    assert [entry.name for entry in tmp_path.iterdir()] == [os.path.basename(str(storage.directory))]
    del handle


def test_an_exit_removes_the_directory_after_an_exception_too(tmp_path: Path) -> None:
    program = WORKER.replace("sys.stdin.read()", "raise SystemError")
    ended = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=False)
    assert ended.returncode == 1 and "SystemError" in ended.stderr
    assert ended.stdout.startswith(str(tmp_path)) and list(tmp_path.iterdir()) == []


FORKED = """
import os, sys, torch
from reactivate.errors import StorageError
from reactivate.storage import Disk

path = sys.argv[1]
storage = Disk(path, least_bytes=0, last=0)
expected = [torch.randn(4096) for _ in range(4)]
handles = [storage.save(tensor.clone()) for tensor in expected]
later = [storage.save(torch.zeros(16)) for _ in range(3)]
mine = storage.directory
child = os.fork()
if child == 0:
    try:
        storage.load(handles[0])
    except StorageError as error:
        assert "forked" in str(error)
    else:
        raise AssertionError("a file of the parent was read")
    assert storage.directory is None
    own = [storage.save(tensor.clone()) for tensor in expected]
    more = [storage.save(torch.zeros(16)) for _ in range(3)]
    assert all(torch.equal(storage.load(one), tensor) for one, tensor in zip(own, expected))
    assert storage.directory != mine and len(os.listdir(path)) == 2
    del handles, own, more
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
assert os.listdir(path) == [os.path.basename(mine)]
assert all(torch.equal(storage.load(one), tensor) for one, tensor in zip(handles, expected))
"""


def test_a_forked_process_leaves_the_files_of_its_parent_alone(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", FORKED, str(tmp_path)], capture_output=True, text=True, check=False, timeout=120
    )
    assert ended.returncode == 0, ended.stderr
    assert list(tmp_path.iterdir()) == []


class Numbers(torch.utils.data.Dataset[Tensor]):
    def __init__(self, storage: Disk) -> None:
        self.storage = storage

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((4, 8), float(index))


def test_workers_of_a_data_loader(tmp_path: Path) -> None:
    torch.manual_seed(1)
    model, storage = Stack(), disk(tmp_path, last=0)
    twin = copy.deepcopy(model)
    reactivate.apply(model, policies.full(inputs=storage))
    for _ in range(2):
        for batch in torch.utils.data.DataLoader(Numbers(storage), batch_size=2, num_workers=2):
            for one in (model, twin):
                one(batch).square().mean().backward()
    assert same([p.grad for p in model.parameters()], [p.grad for p in twin.parameters()])
    assert Path(str(storage.directory)).is_dir()


def test_no_warning_where_nothing_is_wrong(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        handles, _ = filled(disk(tmp_path))
    del handles

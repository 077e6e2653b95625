"""Files of `Disk` and processes: whose they are, who removes them, and who must not."""

from __future__ import annotations

import copy
import fcntl
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from test_offload_disk import disk, filled
from test_offload_inputs import Stack, same
from torch import Tensor

import reactivate
from reactivate import policies
from reactivate.storage import Disk
from reactivate.storage.disk_file import remove_of_the_dead


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
from reactivate.storage.disk_file import remove_of_the_dead

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


STARTING = """
import os, signal, sys, fcntl, tempfile
from reactivate.storage.disk_file import DiskFile
def dies(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[2] == "open":
    os.open = dies
else:
    fcntl.flock = dies
DiskFile(sys.argv[1], None, os.getpid())
"""


@pytest.mark.parametrize("place", ["open", "lock"])
def test_a_process_that_is_killed_while_it_starts_leaves_nothing_for_ever(place: str, tmp_path: Path) -> None:
    ended = subprocess.run([sys.executable, "-c", STARTING, str(tmp_path), place], check=False)
    assert ended.returncode == -signal.SIGKILL and len(list(tmp_path.iterdir())) == 1
    storage = disk(tmp_path, last=0)
    handle = storage.save(torch.randn(64))
    assert [entry.name for entry in tmp_path.iterdir()] == [os.path.basename(str(storage.directory))]
    del handle


@pytest.mark.parametrize("place", ["before the file is there", "before it is locked", "while it is locked by another"])
def test_a_directory_that_is_taken_for_a_dead_ones_is_made_again(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process starts on the same path between the steps of this one."""
    made: list[str] = []

    def once(*args: Any, function: Any, is_between: bool) -> Any:
        if is_between and not made:
            made.append(next(entry.name for entry in tmp_path.iterdir()))
            remove_of_the_dead(str(tmp_path))
        return function(*args)

    opens, locks = os.open, fcntl.flock
    if place == "before the file is there":
        monkeypatch.setattr(
            os, "open", lambda name, *args: once(name, *args, function=opens, is_between=bool(args[0] & os.O_CREAT))
        )
    elif place == "before it is locked":
        monkeypatch.setattr(
            fcntl,
            "flock",
            lambda *args: once(*args, function=locks, is_between=not made and bool(list(tmp_path.glob("*/*")))),
        )
    else:

        def refused(file: int, operation: int) -> None:
            if not made:
                made.append(next(entry.name for entry in tmp_path.iterdir()))
                raise BlockingIOError
            locks(file, operation)

        monkeypatch.setattr(fcntl, "flock", refused)
    storage = disk(tmp_path, last=0)
    handle = storage.save(torch.randn(64))
    left = [entry.name for entry in tmp_path.iterdir()]
    assert made and left == [os.path.basename(str(storage.directory))] and left != made
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
from reactivate.storage.disk_file import remove_of_the_dead

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

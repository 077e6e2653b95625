"""Files of `Disk`, directories of the user, and processes that end, are killed, or fork."""

from __future__ import annotations

import copy
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from offload_cases import Stack, same
from test_offload_disk import disk, filled
from torch import Tensor

import reactivate
from reactivate import policies
from reactivate.storage import Disk


def test_the_users_files_stay_and_nothing_is_added(tmp_path: Path) -> None:
    """Whatever their names: the file of the storage has none."""
    for name in ("reactivate-notes", f"reactivate-{os.getpid()}-abcdefgh", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "tensors").write_text("the user's")
    (tmp_path / "reactivate-1-empty").mkdir()
    before = sorted(tmp_path.rglob("*"))
    storage = disk(tmp_path, last=0)
    handles, expected = filled(storage)
    assert storage.file_bytes > 0 and sorted(tmp_path.rglob("*")) == before
    assert all(torch.equal(storage.load(handle), tensor) for handle, tensor in zip(handles, expected))
    del storage, handles
    assert sorted(tmp_path.rglob("*")) == before


WORKER = """
import os, signal, sys, torch
from reactivate.storage import Disk

storage = Disk(sys.argv[1], least_bytes=0, last=0)
handles = [storage.save(torch.randn(4096)) for _ in range(4)]
assert storage.file_bytes > 0
"""


@pytest.mark.parametrize(
    ("end", "code"), [("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL), ("raise SystemError", 1), ("", 0)]
)
def test_nothing_is_left_however_the_process_ends(end: str, code: int, tmp_path: Path) -> None:
    ended = subprocess.run([sys.executable, "-c", WORKER + end, str(tmp_path)], capture_output=True, check=False)
    assert ended.returncode == code and list(tmp_path.iterdir()) == []


FORKED = """
import os, sys, torch
from reactivate.errors import StorageError
from reactivate.storage import Disk

path = sys.argv[1]
storage = Disk(path, least_bytes=0, last=0)
expected = [torch.randn(4096) for _ in range(4)]
handles = [storage.save(tensor.clone()) for tensor in expected]
later = [storage.save(torch.zeros(16)) for _ in range(3)]
child = os.fork()
if child == 0:
    try:
        storage.load(handles[0])
    except StorageError as error:
        assert "forked" in str(error)
    else:
        raise AssertionError("a file of the parent was read")
    assert storage.file_bytes == 0
    own = [storage.save(tensor.clone()) for tensor in expected]
    more = [storage.save(torch.zeros(16)) for _ in range(3)]
    assert all(torch.equal(storage.load(one), tensor) for one, tensor in zip(own, expected))
    assert storage.file_bytes > 0
    del handles, own, more
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
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
    assert storage.traffic.loaded_bytes > 0

"""Disks that are full, fail or are meddled with: tensors stay in memory, or an error says that they are lost."""

from __future__ import annotations

import copy
import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from offload_cases import Stack, same, trained
from oracle import assert_bitwise
from test_offload_disk import arrived, disk, filled, until, until_empty

import reactivate
from reactivate import policies
from reactivate.errors import StorageError
from reactivate.storage import Disk


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


@pytest.mark.parametrize("name", ["pwrite", "posix_fallocate", "open"])
def test_a_full_disk(name: str, tmp_path: Path, monkeypatch: Any) -> None:
    torch.manual_seed(1)
    model = Stack()
    expected = trained(copy.deepcopy(model))
    storage = disk(tmp_path)
    reactivate.apply(model, policies.full(inputs=storage))
    monkeypatch.setattr(os, name, _full)
    with pytest.warns(UserWarning, match="No space left on device.* tensors stay in memory") as caught:
        assert same(trained(model), expected)
    assert len(caught) == 1 and storage.traffic.loaded_bytes == 0
    until_empty(storage)


def test_a_disk_that_takes_nothing_more(tmp_path: Path, monkeypatch: Any) -> None:
    storage = disk(tmp_path)
    monkeypatch.setattr(os, "pwrite", _nothing)
    with pytest.warns(UserWarning, match="0 of 16,384 bytes were moved"):
        handles, expected = filled(storage, 20)
    for handle, tensor in zip(handles, expected):
        assert_bitwise(tensor, storage.load(handle), "a tensor")


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
    with pytest.raises(StorageError, match=f"could not be read from the file in {tmp_path}.*{message}"):
        out.backward()
    monkeypatch.setattr(os, "preadv", preadv)
    del out, later
    until_empty(storage)
    model(torch.randn(16, 8)).sum().backward()  # and the storage works on


def descriptor(storage: Disk) -> int:
    """Of the file, which has no name."""
    return storage._mover.file._file.fileno()


def test_a_file_that_is_cut_is_an_error(tmp_path: Path) -> None:
    storage = disk(tmp_path)
    handles, _ = filled(storage)
    later = arrived(storage)
    for handle in later:
        until(lambda handle=handle: not handle.piece.is_writing())
    os.ftruncate(descriptor(storage), 4096)
    with pytest.raises(StorageError, match="0 of 16,384 bytes"):
        storage.load(handles[3])
    with pytest.raises(StorageError, match="4,096 of 16,384 bytes"):
        storage.load(handles[0])
    del later


def test_a_file_with_other_bytes_is_an_error(tmp_path: Path) -> None:
    storage = disk(tmp_path)
    handles, expected = filled(storage)
    later = arrived(storage)
    os.pwrite(descriptor(storage), b"x", 3 * 4 * 4096 + 5)
    with pytest.raises(StorageError, match="other bytes were read than had been written"):
        storage.load(handles[3])
    assert_bitwise(expected[2], storage.load(handles[2]), "a tensor beside it")
    del later

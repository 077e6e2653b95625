"""Memory of the simulated accelerator as torch sees it, and which of it torch has freed."""

from __future__ import annotations

import ctypes
import heapq
from typing import Any

import numpy
import torch
from simulated_streams import Block, Lane, Queues, below_everything, locked
from torch import Tensor

CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
aten = torch.ops.aten


class _DLTensor(ctypes.Structure):
    _fields_ = [
        *(("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32)),
        *(("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)),
        *(("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.c_void_p), ("offset", ctypes.c_uint64)),
    ]


class _Managed(ctypes.Structure):
    _fields_ = [("tensor", _DLTensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


class _Releases:
    """Notes which storages torch has freed.

    The deleter of each is `time` of the C library, which writes over the first field of its entry in a table. So no Python
    runs then: an exception may be pending, or another thread may have the interpreter.
    """

    SIZE = 2**16

    def __init__(self) -> None:
        self._table = (_Managed * self.SIZE)()
        words = ctypes.sizeof(_Managed) // 8
        self._found = numpy.frombuffer(self._table, numpy.int64).reshape(self.SIZE, words)[:, 0]
        self._given = numpy.zeros(self.SIZE, numpy.int64)
        self._free = list(range(self.SIZE))  # a heap: so the part that is in use stays small
        self._end = 0

    def add(self, tensor: _DLTensor) -> int:
        """Return the address of an entry for a new storage."""
        index = heapq.heappop(self._free)
        self._end = max(self._end, index + 1)
        self._table[index] = _Managed(tensor, None, _TIME)
        self._given[index] = tensor.data
        return ctypes.addressof(self._table) + index * ctypes.sizeof(_Managed)

    def take(self) -> list[int]:
        """Return the addresses of what was freed since the last call."""
        changed = numpy.flatnonzero(self._found[: self._end] != self._given[: self._end])
        addresses = [int(self._given[index]) for index in changed]
        for index in changed.tolist():
            self._found[index] = self._given[index] = 0
            heapq.heappush(self._free, index)
        return addresses


_TIME = ctypes.cast(ctypes.CDLL(None).time, ctypes.c_void_p).value
releases = _Releases()
_new_capsule = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", ctypes.pythonapi)
)
outlived: dict[int, Block] = {}  # of contexts that are over: torch still holds pointers to them


def device_tensor(block: Block, nbytes: int) -> Tensor:
    """Return the bytes of a block as a tensor on the device: DLPack's name for PrivateUse1 is 12."""
    shape = (ctypes.c_int64 * 1)(nbytes)
    tensor = _DLTensor(block.memory.data_ptr(), 12, 0, 1, 1, 8, 1, shape, None, 0)
    block.shape = shape
    return torch.utils.dlpack.from_dlpack(_new_capsule(releases.add(tensor), b"dltensor", None))


def memory_at(address: int, nbytes: int) -> Tensor:
    return torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=torch.uint8)


class Memory(Queues):
    """The blocks of memory that tensors on the device point to."""

    def current(self) -> Lane:
        """Return the stream of this thread."""
        raise NotImplementedError

    def freed(self) -> list[int]:
        found = releases.take()
        for address in found:
            outlived.pop(address, None)
        return [address for address in found if address in self.blocks]

    @locked
    def allocate(self, size: Any, stride: Any, dtype: torch.dtype) -> Tensor:
        """Return a new tensor on the current stream."""
        with below_everything():
            extent = 0 if 0 in size else 1 + sum((n - 1) * step for n, step in zip(size, stride))
            nbytes = extent * dtype.itemsize
            flat = device_tensor(self.new_block(self.current(), nbytes), nbytes)
            return aten.as_strided.default.redispatch(CPU, aten.view.dtype(flat, dtype), size, stride)

    def block_of(self, tensor: Tensor) -> Block:
        return self.blocks[tensor.untyped_storage().data_ptr()]

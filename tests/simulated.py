"""A simulated accelerator, on which an error with streams gives wrong bits, on a CPU and from a seed.

    with simulated.accelerator(schedule="late", seed=0) as device:
        model.to(device)

Ops on its tensors are queued on the current stream, and run when something needs them. A schedule chooses among all
orders that streams and events allow, so a program that relies on more than these sooner or later reads garbage:

- "late": a stream runs only up to what the host or another stream waits for.
- "early": side streams run as soon as events allow; the default stream as in "late".
- "random": after each op any stream may run some of what events allow, by the seed.
- "eager": every op runs when it is called, for debugging.

Freed memory is overwritten with garbage in the order of the stream that allocated it, as by a caching allocator whose
next user comes at once. This module is also the device module, `torch.get_device_module("privateuseone")`.

Import it in a process of its own, before the first backward pass: torch counts the devices then, has one accelerator at
most, and forgets none. `test_simulated` runs the files of tests that use it.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import random
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map
from torch.utils.flop_counter import flop_registry

NAME = "privateuseone"
DEVICE = torch.device(NAME, 0)
SCHEDULES = ("late", "early", "random", "eager")
GARBAGE = 0xFB

synchronisations = 0  # how often the host waited for the device
aten = torch.ops.aten


class Work(NamedTuple):
    """An op as a function of durations sees it: `kind` is "compute", "to_host" or "to_device"."""

    name: str
    kind: str
    nbytes: int
    flops: int


class Entry(NamedTuple):
    """A line of the log: when an op would have run, in seconds, if streams ran in parallel."""

    stream: int
    name: str
    start: float
    end: float


def roofline(
    work: Work, flops: float = 1e12, memory: float = 1e11, to_host: float = 1e10, to_device: float = 1e10
) -> float:
    """Return the seconds that `work` takes on a device of these rates per second: the default of durations."""
    if work.kind == "compute":
        return max(work.flops / flops, work.nbytes / memory)
    return work.nbytes / (to_host if work.kind == "to_host" else to_device)


# -- streams and their order ---------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Mark:
    """A point in a lane that others can wait for: an event as it was recorded once."""

    lane: Lane
    time: float
    done: bool = False


@dataclass(eq=False)
class Task:
    """An entry of a lane: it waits for `after`, and runs. A `free` one may run as soon as the entries before it have."""

    run: Callable[[], None]
    after: Mark | None = None
    free: bool = False


@dataclass(eq=False)
class Lane:
    """The queue of one stream."""

    index: int
    pace: float  # how often it runs by itself under the schedule "random"
    time: float = 0.0  # when its last op ends on the virtual clock
    tasks: deque[Task] = field(default_factory=deque)

    def is_ready(self) -> bool:
        return bool(self.tasks) and (self.tasks[0].after is None or self.tasks[0].after.done)


@dataclass(eq=False)
class Block:
    """The memory of one storage."""

    memory: Tensor
    lane: Lane
    managed: Any = None
    users: set[Lane] = field(default_factory=set)  # besides the lane that allocated it


def _locked(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def locked(self: Simulator, *args: Any, **kwargs: Any) -> Any:
        with self.lock:
            return function(self, *args, **kwargs)

    return locked


class Simulator:
    """The state of the device inside of one `accelerator` context."""

    def __init__(self, schedule: str, seed: int, duration: Callable[[Work], float]) -> None:
        self.schedule, self.duration = schedule, duration
        self.random, self.generator = random.Random(seed), torch.Generator().manual_seed(0)
        self.lock, self.local, self.home = threading.RLock(), threading.local(), threading.get_ident()
        self.lanes: list[Lane] = []
        self.blocks: dict[int, Block] = {}  # by address
        self.freed: deque[int] = deque()  # blocks that torch let go of, and no lane knows about yet
        self.deferred: list[tuple[Block, list[Mark]]] = []  # freed, but in use on other lanes
        self.pinned: dict[int, Tensor] = {}  # by address
        self.host_time, self.engines, self.log = 0.0, {"compute": 0.0, "to_host": 0.0, "to_device": 0.0}, list[Entry]()
        self.allocated = self.peak = 0
        self.new_lane()
        self.home_stream = Stream._of(0)

    @_locked
    def new_lane(self) -> Lane:
        self.lanes.append(Lane(len(self.lanes), self.random.choice([0.02, 0.2, 0.5, 0.9])))
        return self.lanes[-1]

    def current(self) -> Lane:
        return self.lanes[current_stream().stream_id]

    # -- queueing

    @_locked
    def enqueue(
        self, name: str, run: Callable[[], None], kind: str = "compute", nbytes: int = 0, flops: int = 0
    ) -> None:
        """Queue an op on the current stream, and let the schedule run what it likes."""
        self.settle()
        lane = self.current()
        start = max(lane.time, self.host_time, self.engines[kind])
        lane.time = self.engines[kind] = start + self.duration(Work(name, kind, nbytes, flops))
        self.log.append(Entry(lane.index, name, start, lane.time))
        lane.tasks.append(Task(run))
        self.progress()

    @_locked
    def mark(self, lane: Lane) -> Mark:
        """Queue a point that can be waited for."""
        self.settle()
        mark = Mark(lane, max(lane.time, self.host_time))
        lane.tasks.append(Task(functools.partial(self.reach, mark)))
        self.progress()
        return mark

    @_locked
    def wait(self, lane: Lane, mark: Mark) -> None:
        """Let what `lane` is given from now on run after `mark`."""
        self.settle()
        lane.time = max(lane.time, mark.time)
        lane.tasks.append(Task(lambda: None, after=mark))
        self.progress()

    @_locked
    def settle(self) -> None:
        """Queue the end of the blocks that were freed since the last call."""
        while self.freed:
            block = self.blocks.pop(self.freed.popleft())
            self.allocated -= block.memory.numel()
            marks = []
            for lane in block.users - {block.lane}:
                marks.append(Mark(lane, lane.time))
                lane.tasks.append(Task(functools.partial(self.reach, marks[-1])))
            block.lane.tasks.append(Task(functools.partial(self.poison, block, marks), free=True))

    def reach(self, mark: Mark) -> None:
        mark.done = True
        waiting, self.deferred = self.deferred, []
        for block, marks in waiting:
            self.poison(block, marks)

    def poison(self, block: Block, marks: list[Mark]) -> None:
        if all(mark.done for mark in marks):
            block.memory.fill_(GARBAGE)
        else:
            self.deferred.append((block, marks))

    # -- running

    def step(self, lane: Lane) -> None:
        """Run the next entry of `lane`, and before that what it waits for."""
        if (after := lane.tasks[0].after) is not None:
            self.run_until(after)
        task = lane.tasks.popleft()
        with _below_everything():
            task.run()

    def run_until(self, mark: Mark) -> None:
        while not mark.done:
            self.step(mark.lane)
        while mark.lane.tasks and mark.lane.tasks[0].free:
            self.step(mark.lane)  # memory is given to its next user as soon as possible

    def progress(self) -> None:
        """Run what the schedule runs by itself."""
        if self.schedule == "eager":
            for lane in self.lanes:
                while lane.tasks:
                    self.step(lane)
        elif self.schedule == "early":
            while ready := [lane for lane in self.lanes[1:] if lane.is_ready()]:
                for lane in ready:
                    self.step(lane)
        elif self.schedule == "random":
            for lane in self.random.sample(self.lanes, len(self.lanes)):
                while lane.is_ready() and self.random.random() < lane.pace:
                    self.step(lane)

    @_locked
    def query(self, mark: Mark) -> bool:
        """Return whether `mark` was reached. To ask runs one entry, so that asking in a loop comes to an end."""
        if not (done := mark.done):
            self.step(mark.lane)
        return done

    @_locked
    def is_idle(self, lane: Lane) -> bool:
        """Return whether `lane` has run all it was given, as `query`."""
        self.settle()
        idle = not lane.tasks
        if not idle:
            self.step(lane)
        return idle

    @_locked
    def synchronize(self, *marks: Mark) -> None:
        """Let the host wait for `marks`."""
        global synchronisations
        synchronisations += 1
        self.progress()
        for mark in marks:
            self.run_until(mark)
            self.host_time = max(self.host_time, mark.time)

    # -- memory

    @_locked
    def allocate(self, size: Any, stride: Any, dtype: torch.dtype) -> Tensor:
        """Return a new tensor, in memory whose last user on the current stream may still write to it."""
        self.settle()
        with _below_everything():
            extent = 0 if 0 in size else 1 + sum((n - 1) * step for n, step in zip(size, stride))
            nbytes = extent * dtype.itemsize
            block = Block(torch.full((max(nbytes, 1),), GARBAGE, dtype=torch.uint8), self.current())
            self.blocks[block.memory.data_ptr()] = block
            self.allocated += block.memory.numel()
            self.peak = max(self.peak, self.allocated)
            block.lane.tasks.append(Task(functools.partial(block.memory.fill_, GARBAGE)))
            flat = _device_tensor(block, nbytes)
            return aten.as_strided.default.redispatch(_CPU, aten.view.dtype(flat, dtype), size, stride)

    def alias(self, tensor: Any, snapshot: bool = False) -> Any:
        """Return the CPU tensor in the memory of a device tensor; anything else as it is, a CPU tensor as it is now."""
        if not isinstance(tensor, Tensor):
            return torch.device("cpu") if isinstance(tensor, torch.device) else tensor
        if tensor.device.type != NAME:
            return tensor.clone() if snapshot else tensor
        storage = self.blocks[tensor.untyped_storage().data_ptr()].memory.untyped_storage()
        found = torch.empty(0, dtype=tensor.dtype)
        return found.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())

    def resize(self, tensor: Tensor, size: Any, *, memory_format: Any = None) -> Tensor:
        """Give a tensor another shape, in memory of its own, without its values."""
        if tensor.shape != torch.Size(size):
            aten.set_.source_Tensor.redispatch(_CPU, tensor, _empty(size, tensor.dtype, memory_format=memory_format))
        return tensor

    # -- ops

    def copy(self, target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        """Queue `target.copy_(source)`; between host and device, wait for it unless it is non_blocking."""
        kind = "to_host" if target.device.type == "cpu" else "to_device" if source.device.type == "cpu" else "compute"
        with _below_everything():
            late = kind != "to_device" or not non_blocking or is_pinned(source)
            to, of = self.alias(target), self.alias(source, snapshot=not late)
        nbytes = source.nbytes if kind != "compute" else source.nbytes + target.nbytes
        self.enqueue(f"aten::copy_ {kind}", lambda: to.copy_(of), kind, nbytes)
        if kind != "compute" and not non_blocking:
            self.synchronize(self.mark(self.current()))
        return target

    def call(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Queue any other op, with results whose shapes are known without running it."""
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if any(leaf.device.type == "cpu" and leaf.dim() for leaf in leaves) and "index" not in op._schema.name:
            raise RuntimeError(f"{op} expects all tensors on {NAME}, but got one on the CPU.")
        seed = None
        if torch.Tag.nondeterministic_seeded in op.tags:  # in the order of the program, whatever the schedule
            generator = next((leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Generator)), None)
            seed = int(torch.randint(2**62, (), generator=generator or self.generator))
            args, kwargs = tree_map(lambda leaf: None if isinstance(leaf, torch.Generator) else leaf, (args, kwargs))
        with _below_everything():
            host = tree_map(functools.partial(self.alias, snapshot=True), (args, kwargs))
            results = self.results_of(op, args, kwargs)
        if results is None:  # its results depend on values
            self.synchronize(self.mark(self.current()))
            with _below_everything():
                found = _run(op, *host, seed)
            return tree_map(lambda leaf: self.upload(leaf) if isinstance(leaf, Tensor) else leaf, found)
        targets = [self.alias(leaf) if isinstance(leaf, Tensor) else None for leaf in tree_leaves(results)]

        def run() -> None:
            for target, value in zip(targets, tree_leaves(_run(op, *host, seed))):
                if target is not None and target.data_ptr() != value.data_ptr():
                    target.copy_(value)

        count = flop_registry.get(op.overloadpacket)
        flops = count(*args, **kwargs, out_val=results) if count and "out" not in kwargs else 0
        touched = {id(leaf): leaf.nbytes for leaf in [*leaves, *tree_leaves(results)] if isinstance(leaf, Tensor)}
        self.enqueue(op._schema.name, run, nbytes=sum(touched.values()), flops=flops)
        return results

    def results_of(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the tensors that `op` returns, the new ones without values yet; None if only running it tells."""
        returns = op._schema.returns
        if not all("Tensor" in str(one.type) for one in returns):
            return None
        written = _written(op, args, kwargs)
        meta = tree_map(_to_meta, (args, kwargs))
        if all(_writes(one) for one in returns):
            if any(one.is_out for one in op._schema.arguments):
                op(*meta[0], **meta[1])
                for out, shape in zip(written, _written(op, *meta)):
                    self.resize(out, shape.shape)
            return written[0] if len(returns) == 1 else tuple(written[: len(returns)])
        try:
            found = op(*meta[0], **meta[1])
        except (NotImplementedError, RuntimeError):
            return None
        return tree_map(
            lambda leaf: self.allocate(leaf.shape, leaf.stride(), leaf.dtype) if isinstance(leaf, Tensor) else leaf,
            found,
        )

    def upload(self, value: Tensor) -> Tensor:
        """Return a device tensor with this value."""
        found = self.allocate(value.shape, value.stride(), value.dtype)
        to = self.alias(found)
        self.enqueue("upload", lambda: to.copy_(value))
        return found


# -- torch's side --------------------------------------------------------------------------------------------------------

_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_simulator: Simulator | None = None
_WHOLE = ("aten::convolution", "aten::convolution_backward")  # torch chooses a kernel inside of them, by the device
_METADATA = ("aten::set_", "aten::is_set_to")


@contextlib.contextmanager
def _below_everything() -> Iterator[None]:
    """A context in which nobody sees the ops on the CPU that stand for those on the device."""
    with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction(), torch._C._AutoDispatchBelowAutograd():
        with torch._C._DisableAutocast():
            yield


def _run(op: Any, args: Any, kwargs: Any, seed: int | None) -> Any:
    if seed is None:
        return op(*args, **kwargs)
    before = torch.default_generator.get_state()
    torch.default_generator.manual_seed(seed)
    try:
        return op(*args, **kwargs)
    finally:
        torch.default_generator.set_state(before)


def _to_meta(leaf: Any) -> Any:
    if isinstance(leaf, torch.device):
        return torch.device("meta")
    if not isinstance(leaf, Tensor):
        return leaf
    return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")


def _writes(one: Any) -> bool:
    return one.alias_info is not None and one.alias_info.is_write


def _written(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Return the arguments that `op` writes to."""
    given = dict(zip((one.name for one in op._schema.arguments), args)) | kwargs
    return [given.get(one.name) for one in op._schema.arguments if _writes(one)]


def _empty(
    size: Any,
    dtype: Any = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
    memory_format: Any = None,
) -> Tensor:
    meta = torch.empty(size, dtype=dtype, device="meta", memory_format=memory_format or torch.contiguous_format)
    return _active().allocate(meta.shape, meta.stride(), meta.dtype)


def _empty_strided(size: Any, stride: Any, dtype: Any = None, **_: Any) -> Tensor:
    return _active().allocate(size, stride, dtype or torch.get_default_dtype())


def _record_stream(tensor: Tensor, stream: torch.Stream) -> None:
    simulator = _active()
    simulator.blocks[tensor.untyped_storage().data_ptr()].users.add(simulator.lanes[stream.stream_id])


_OWN: dict[str, Callable[..., Any]] = {
    "aten::empty.memory_format": _empty,
    "aten::empty_strided": _empty_strided,
    "aten::record_stream": _record_stream,
    "aten::resize_": lambda *args, **kwargs: _active().resize(*args, **kwargs),
    "aten::copy_": lambda *args: _active().copy(*args),
    "aten::_copy_from": lambda source, target, non_blocking=False: _active().copy(target, source, non_blocking),
}


def _kernel(name: str) -> Callable[..., Any]:
    @functools.cache
    def found() -> Any:
        packet, _, overload = name.removeprefix("aten::").partition(".")
        return getattr(getattr(aten, packet), overload or "default")

    return lambda *args, **kwargs: _dispatch(found(), *args, **kwargs)


def _dispatch(op: Any, *args: Any, **kwargs: Any) -> Any:
    if op._schema.name in _METADATA or any(one.alias_info and not _writes(one) for one in op._schema.returns):
        return op.redispatch(_CPU, *args, **kwargs)  # a view: the CPU's looks at no memory
    return _active().call(op, args, kwargs)


def _active() -> Simulator:
    if _simulator is None:
        raise RuntimeError("A tensor of the simulated accelerator was used outside of its context.")
    return _simulator


class _DLTensor(ctypes.Structure):
    _fields_ = [
        *(("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32)),
        *(("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)),
        *(("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.c_void_p), ("offset", ctypes.c_uint64)),
    ]


class _Managed(ctypes.Structure):
    _fields_ = [("tensor", _DLTensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


@ctypes.CFUNCTYPE(None, ctypes.c_void_p)
def _delete(managed: int) -> None:
    """Hear that torch frees a storage: at any time, so that it only takes a note."""
    if _simulator is not None:
        _simulator.freed.append(_Managed.from_address(managed).tensor.data)


_DELETE = ctypes.cast(_delete, ctypes.c_void_p).value
_DO_NOTHING = ctypes.cast(ctypes.pythonapi.Py_IsInitialized, ctypes.c_void_p).value
_new_capsule = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", ctypes.pythonapi)
)
_outlived: list[Block] = []  # torch still holds pointers to them


def _device_tensor(block: Block, nbytes: int) -> Tensor:
    """Return the bytes of a block as a tensor on the device: DLPack's name for PrivateUse1 is 12."""
    shape = (ctypes.c_int64 * 1)(nbytes)
    tensor = _DLTensor(block.memory.data_ptr(), 12, 0, 1, 1, 8, 1, shape, None, 0)
    block.managed = _Managed(tensor, None, _DELETE)
    return torch.utils.dlpack.from_dlpack(_new_capsule(ctypes.addressof(block.managed), b"dltensor", None))


class _Hooks(torch._C._acc.PrivateUse1Hooks):
    def is_available(self) -> bool:
        return _simulator is not None

    def has_primary_context(self, index: int) -> bool:
        return _simulator is not None

    def is_built(self) -> bool:
        return True


class _Guard(torch._C._acc.DeviceGuard):
    def type_(self) -> Any:
        return torch._C._autograd.DeviceType.PrivateUse1


@contextlib.contextmanager
def accelerator(
    schedule: str = "late", seed: int = 0, duration: Callable[[Work], float] = roofline
) -> Iterator[torch.device]:
    """A context with the device. Its end forgets everything, what is still queued as well.

    Args:
        schedule: one of `SCHEDULES`.
        seed: of the schedule "random".
        duration: how many seconds an op takes on the virtual clock.
    """
    global _simulator, synchronisations
    assert schedule in SCHEDULES and _simulator is None
    _simulator, synchronisations = Simulator(schedule, seed, duration), 0
    ops, rest = torch.library.Library("aten", "IMPL"), torch.library.Library("_", "IMPL")
    try:
        rest.fallback(_dispatch, "PrivateUse1")
        has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
        for name in torch._C._dispatch_get_all_op_names():
            if name in _OWN:
                ops.impl(name.removeprefix("aten::"), _OWN[name], "PrivateUse1")
            elif name in _WHOLE or name.startswith("aten::") and has_kernel(name, "CPU"):
                # Also where torch could compose it from others, which would give other bits than the CPU's.
                ops.impl(name.removeprefix("aten::"), _kernel(name), "PrivateUse1")
        yield DEVICE
    finally:
        ops._destroy()
        rest._destroy()
        _simulator, ended = None, _simulator
        for block in ended.blocks.values():
            block.managed.deleter = _DO_NOTHING
            _outlived.append(block)


# -- the device module ---------------------------------------------------------------------------------------------------


class Stream(torch.Stream):
    """A stream, as `torch.cuda.Stream`."""

    def __new__(cls, device: Any = None, priority: int = 0) -> Stream:
        return cls._of(_active().new_lane().index)

    @classmethod
    def _of(cls, index: int) -> Stream:
        return super().__new__(cls, stream_id=index, device_index=0, device_type=20)

    @property
    def _lane(self) -> Lane:
        return _active().lanes[self.stream_id]

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        event.wait(self)

    def wait_stream(self, stream: Stream) -> None:
        self.wait_event(stream.record_event())

    def query(self) -> bool:
        return _active().is_idle(self._lane)

    def synchronize(self) -> None:
        self.record_event().synchronize()

    def __enter__(self) -> Stream:
        self._context = stream(self)
        self._context.__enter__()
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self._context.__exit__(*exc_info)


class Event:
    """An event, as `torch.cuda.Event`."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        self._mark: Mark | None = None

    def record(self, stream: Stream | None = None) -> None:
        self._mark = _active().mark((stream or current_stream())._lane)

    def wait(self, stream: Stream | None = None) -> None:
        if self._mark is not None:
            _active().wait((stream or current_stream())._lane, self._mark)

    def query(self) -> bool:
        return self._mark is None or _active().query(self._mark)

    def synchronize(self) -> None:
        if self._mark is not None:
            _active().synchronize(self._mark)

    def elapsed_time(self, end: Event) -> float:
        """Return the milliseconds between two events on the virtual clock."""
        assert self._mark is not None and end._mark is not None
        return (end._mark.time - self._mark.time) * 1000


def current_stream(device: Any = None) -> Stream:
    """Return the stream of this thread; a backward pass takes that of the thread in which the context was entered."""
    simulator = _active()
    found = getattr(simulator.local, "stream", None)
    if found is None and torch._C._current_graph_task_id() != -1:
        found = simulator.home_stream
    return found or default_stream()


def default_stream(device: Any = None) -> Stream:
    return Stream._of(0)


def set_stream(stream: Stream) -> None:
    simulator = _active()
    simulator.local.stream = stream
    if threading.get_ident() == simulator.home:
        simulator.home_stream = stream


@contextlib.contextmanager
def stream(stream: Stream | None) -> Iterator[None]:
    """A context in which this is the current stream."""
    simulator = _active()
    before, home = getattr(simulator.local, "stream", None), simulator.home_stream
    if stream is not None:
        set_stream(stream)
    try:
        yield
    finally:
        simulator.local.stream = before
        if threading.get_ident() == simulator.home:
            simulator.home_stream = home


def synchronize(device: Any = None) -> None:
    simulator = _active()
    simulator.synchronize(*map(simulator.mark, simulator.lanes))


class device(contextlib.nullcontext[None]):
    """A context with this device as the current one: there is but one."""

    def __init__(self, device: Any = None) -> None:
        super().__init__()


def device_count() -> int:
    return 1


def current_device() -> int:
    return 0


def is_available() -> bool:
    return _simulator is not None


def is_initialized() -> bool:
    return _simulator is not None


def _is_in_bad_fork() -> bool:
    return False


def memory_allocated(device: Any = None) -> int:
    _active().settle()
    return _active().allocated


def max_memory_allocated(device: Any = None) -> int:
    return _active().peak


def reset_peak_memory_stats(device: Any = None) -> None:
    _active().peak = memory_allocated()


def get_rng_state(device: Any = None) -> Tensor:
    return _active().generator.get_state()


def set_rng_state(state: Tensor, device: Any = None) -> None:
    _active().generator.set_state(state)


def manual_seed(seed: int) -> None:
    if _simulator is not None:  # torch.manual_seed calls this in any case
        _simulator.generator.manual_seed(seed)


manual_seed_all = manual_seed


# -- the host's memory, and the clock ------------------------------------------------------------------------------------


def pin(tensor: Tensor) -> Tensor:
    """Pin the memory of a CPU tensor: copies from it that do not block read it late."""
    _active().pinned[tensor.untyped_storage().data_ptr()] = tensor
    return tensor


def unpin(tensor: Tensor) -> None:
    """Free pinned memory, which its next user overwrites at once."""
    del _active().pinned[tensor.untyped_storage().data_ptr()]
    with _below_everything():
        torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).fill_(GARBAGE)


def is_pinned(tensor: Tensor) -> bool:
    return tensor.untyped_storage().data_ptr() in _active().pinned


def elapsed() -> float:
    """Return when the last stream is done on the virtual clock, in seconds."""
    return max(_active().host_time, *(lane.time for lane in _active().lanes))


def log() -> list[Entry]:
    """Return the ops since the context began."""
    return _active().log


# Before the first backward pass of the process, which starts a thread for each device that it knows; and for good.
_REGISTERED = _Hooks(), _Guard()
torch._register_device_module(NAME, sys.modules[__name__])
torch.utils.rename_privateuse1_backend(NAME)  # torch's accelerator from now on: autograd asks for its streams
torch._C._acc.register_python_privateuseone_hook(_REGISTERED[0])
torch._C._acc.register_python_privateuseone_device_guard(_REGISTERED[1])


class cudart:
    """The part of CUDA's runtime that locks memory of the host, as `torch.cuda.cudart()`."""

    @staticmethod
    def cudaHostRegister(address: int, nbytes: int, flags: int) -> int:
        _active().pinned[address] = _memory_at(address, nbytes)
        return 0

    @staticmethod
    def cudaHostUnregister(address: int) -> int:
        unpin(_active().pinned[address])
        return 0


def _memory_at(address: int, nbytes: int) -> Tensor:
    return torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=torch.uint8)

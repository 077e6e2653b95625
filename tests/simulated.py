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
import functools
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from simulated_errors import Guard, engine_run_backward, run_backward
from simulated_memory import CPU, Memory, memory_at, outlived
from simulated_ops import is_written, leaves_of, map_leaves, run_op, shapes_of, write_to, written_by
from simulated_streams import GARBAGE, Entry, Lane, Mark, Work, below_everything, roofline
from torch import Tensor
from torch.utils.flop_counter import flop_registry

NAME = os.environ.get("SIMULATED_DEVICE", "privateuseone")
"""What the device is called: once in a process."""
torch.utils.rename_privateuse1_backend(NAME)  # torch's accelerator from now on: autograd asks for its streams
DEVICE = torch.device(NAME, 0)
aten = torch.ops.aten


class Simulator(Memory):
    """The state of the device inside of one `accelerator` context."""

    def __init__(self, schedule: str, seed: int, duration: Callable[[Work], float]) -> None:
        super().__init__(schedule, seed, duration)
        self.generator = torch.Generator().manual_seed(0)
        self.pinned: dict[int, Tensor] = {}  # by address
        self.local, self.home, self.home_stream = threading.local(), threading.get_ident(), default_stream()

    def current(self) -> Lane:
        return self.lanes[current_stream().stream_id]

    # -- memory

    def resize(self, tensor: Tensor, size: Any, *, memory_format: Any = None) -> Tensor:
        """Give a tensor another shape, in memory of its own, without its values."""
        if tensor.shape != torch.Size(size):
            aten.set_.source_Tensor.redispatch(CPU, tensor, _empty(size, tensor.dtype, memory_format=memory_format))
        return tensor

    def alias(self, value: Any) -> Any:
        """Return the CPU tensor in the memory of a device tensor; a CPU tensor as it is now; anything else as it is."""
        if isinstance(value, torch.device):
            return torch.device("cpu")
        if not isinstance(value, Tensor):
            return value
        if value.device.type != NAME:
            return value.clone()
        found, storage = torch.empty(0, dtype=value.dtype), self.block_of(value).memory.untyped_storage()
        return found.set_(storage, value.storage_offset(), value.shape, value.stride())

    # -- ops

    def copy(self, target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        """Queue `target.copy_(source)`; between host and device, wait for it unless it is non_blocking."""
        kind = "to_host" if target.device.type == "cpu" else "to_device" if source.device.type == "cpu" else "compute"
        with below_everything():
            to = target if kind == "to_host" else self.alias(target)
            of = source if kind == "to_device" and is_pinned(source) else self.alias(source)
        nbytes = source.nbytes + (target.nbytes if kind == "compute" else 0)
        self.enqueue(self.current(), lambda: to.copy_(of), Work(f"aten::copy_ {kind}", kind, nbytes, 0))
        if kind != "compute" and not non_blocking:
            self.synchronize(self.mark(self.current()))
        return target

    def call(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Queue any other op, with results whose shapes are known without running it."""
        leaves = list(leaves_of((args, kwargs)))
        inputs = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if any(leaf.device.type == "cpu" and leaf.dim() for leaf in inputs) and "index" not in op._schema.name:
            raise RuntimeError(f"{op} expects all tensors on {NAME}, but got one on the CPU.")
        seed = None
        if torch.Tag.nondeterministic_seeded in op.tags:  # in the order of the program, whatever the schedule
            generator = next((leaf for leaf in leaves if isinstance(leaf, torch.Generator)), self.generator)
            seed = int(torch.randint(2**62, (), generator=generator))
            args, kwargs = map_leaves(lambda leaf: None if isinstance(leaf, torch.Generator) else leaf, (args, kwargs))
        with below_everything():
            results = self.results_of(op, args, kwargs)
            host_args, host_kwargs = map_leaves(self.alias, (args, kwargs))
            run = functools.partial(run_op, op, host_args, host_kwargs, seed)
            if results is None:  # only the values tell
                self.synchronize(self.mark(self.current()))
                return map_leaves(self.upload, run())
            targets = [self.alias(leaf) for leaf in leaves_of(results)]
        outputs = [leaf for leaf in leaves_of(results) if isinstance(leaf, Tensor)]
        nbytes = sum({id(leaf): leaf.nbytes for leaf in [*inputs, *outputs]}.values())
        count = None if "out" in kwargs else flop_registry.get(op.overloadpacket)
        flops = count(*args, **kwargs, out_val=results) if count else 0
        work = Work(op._schema.name, "compute", nbytes, flops)
        self.enqueue(self.current(), lambda: write_to(targets, list(leaves_of(run()))), work)
        return results

    def results_of(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the tensors that `op` returns, the new ones without values yet; None if only the values tell."""
        returns = op._schema.returns
        if not all("Tensor" in str(one.type) for one in returns):
            return None
        if not all(map(is_written, returns)):
            found = shapes_of(op, args, kwargs)
            return None if found is None else map_leaves(self.new_like, found[0])
        written = written_by(op, args, kwargs)
        if any(one.is_out for one in op._schema.arguments):
            for out, shape in zip(written, shapes_of(op, args, kwargs)[1]):
                self.resize(out, shape.shape)
        return written[0] if len(returns) == 1 else tuple(written[: len(returns)])

    def new_like(self, value: Any) -> Any:
        return self.allocate(value.shape, value.stride(), value.dtype) if isinstance(value, Tensor) else value

    def upload(self, value: Any) -> Any:
        """Return a device tensor with the value of one on the CPU."""
        if isinstance(value, Tensor):
            found = self.new_like(value)
            self.enqueue(
                self.current(), functools.partial(self.alias(found).copy_, value), Work("upload", "compute", 0, 0)
            )
            return found
        return value


# -- torch's side --------------------------------------------------------------------------------------------------------

_simulator: Simulator | None = None
_WHOLE = ("aten::convolution", "aten::convolution_backward")  # torch chooses a kernel inside of them, by the device
_METADATA = ("aten::set_", "aten::is_set_to")


def _empty(size: Any, dtype: Any = None, *, memory_format: Any = None, **_: Any) -> Tensor:
    meta = torch.empty(size, dtype=dtype, device="meta", memory_format=memory_format or torch.contiguous_format)
    return _active().allocate(meta.shape, meta.stride(), meta.dtype)


def _empty_strided(size: Any, stride: Any, dtype: Any = None, **_: Any) -> Tensor:
    return _active().allocate(size, stride, dtype or torch.get_default_dtype())


def _record_stream(tensor: Tensor, stream: torch.Stream) -> None:
    simulator = _active()
    simulator.block_of(tensor).users.add(simulator.lanes[stream.stream_id])


_OWN: dict[str, Callable[..., Any]] = {
    "empty.memory_format": _empty,
    "empty_strided": _empty_strided,
    "record_stream": _record_stream,
    "resize_": lambda *args, **kwargs: _active().resize(*args, **kwargs),
    "copy_": lambda *args: _active().copy(*args),
    "_copy_from": lambda source, target, non_blocking=False: _active().copy(target, source, non_blocking),
}


@functools.cache
def _kernels() -> dict[str, Callable[..., Any]]:
    """Return {op: its kernel}: for all that the CPU has a kernel of its own for.

    Also where torch could compose an op from others, which would give other bits than the CPU's.
    """
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::")]
    whole = [name.removeprefix("aten::") for name in names if name in _WHOLE or has_kernel(name, "CPU")]
    return {name: _kernel(name) for name in whole} | _OWN


def _kernel(name: str) -> Callable[..., Any]:
    @functools.cache
    def found() -> Any:
        packet, _, overload = name.partition(".")
        return getattr(getattr(aten, packet), overload or "default")

    return lambda *args, **kwargs: _dispatch(found(), *args, **kwargs)


def _dispatch(op: Any, *args: Any, **kwargs: Any) -> Any:
    if op._schema.name in _METADATA or any(one.alias_info and not is_written(one) for one in op._schema.returns):
        return op.redispatch(CPU, *args, **kwargs)  # a view: the CPU's looks at no memory
    return _active().call(op, args, kwargs)


def _active() -> Simulator:
    if _simulator is None:
        raise RuntimeError("A tensor of the simulated accelerator was used outside of its context.")
    return _simulator


class _Hooks(torch._C._acc.PrivateUse1Hooks):
    def is_available(self) -> bool:
        return _simulator is not None

    def has_primary_context(self, index: int) -> bool:
        return _simulator is not None

    def is_built(self) -> bool:
        return True


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
    global _simulator
    assert _simulator is None
    _simulator = Simulator(schedule, seed, duration)
    ops, rest = torch.library.Library("aten", "IMPL"), torch.library.Library("_", "IMPL")
    torch.autograd._engine_run_backward = run_backward
    try:
        rest.fallback(_dispatch, "PrivateUse1")
        for name, kernel in _kernels().items():
            ops.impl(name, kernel, "PrivateUse1")
        ops.impl("is_pinned", lambda tensor, device=None: is_pinned(tensor), "CPU")
        ops.impl("_pin_memory", lambda tensor, device=None: pin(tensor.clone()), "CPU")
        yield DEVICE
    finally:
        torch.autograd._engine_run_backward = engine_run_backward
        ops._destroy()
        rest._destroy()
        _simulator, ended = None, _simulator
        ended.settle()
        outlived.update(ended.blocks)


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


_initialized = True  # torch's own checkpointing looks here whether there are random numbers


def device_count() -> int:
    return 1


def current_device() -> int:
    return 0


def is_available() -> bool:
    return _simulator is not None


def is_initialized() -> bool:
    return _simulator is not None


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.bfloat16, torch.float16]


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
    with below_everything():
        torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).fill_(GARBAGE)


def count_pinned() -> int:
    """Return how many pieces of memory are pinned."""
    return len(_active().pinned)


def is_pinned(tensor: Tensor) -> bool:
    return tensor.untyped_storage().data_ptr() in _active().pinned


def __getattr__(name: str) -> Any:
    if name == "synchronisations":  # how often the host waited for the device
        return _active().synchronisations
    raise AttributeError(name)


def elapsed() -> float:
    """Return when the last stream is done on the virtual clock, in seconds."""
    return max(_active().host_time, *(lane.time for lane in _active().lanes))


def log() -> list[Entry]:
    """Return the ops since the context began."""
    return _active().log


# Before the first backward pass of the process, which starts a thread for each device that it knows; and for good.
_REGISTERED = _Hooks(), Guard()
torch._register_device_module(NAME, sys.modules[__name__])
torch._C._acc.register_python_privateuseone_hook(_REGISTERED[0])
torch._C._acc.register_python_privateuseone_device_guard(_REGISTERED[1])


class cudart:
    """The part of CUDA's runtime that locks memory of the host, as `torch.cuda.cudart()`."""

    @staticmethod
    def cudaHostRegister(address: int, nbytes: int, flags: int) -> int:
        pinned = _active().pinned
        if any(start < address + nbytes and address < start + memory.nbytes for start, memory in pinned.items()):
            return 712  # cudaErrorHostMemoryAlreadyRegistered
        pinned[address] = memory_at(address, nbytes)
        return 0

    @staticmethod
    def cudaHostUnregister(address: int) -> int:
        if _simulator is not None:  # whose memory may be let go of after it
            unpin(_simulator.pinned[address])
        return 0

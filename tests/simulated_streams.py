"""The streams of `simulated`: queues that run in an order which events allow and a schedule chooses."""

from __future__ import annotations

import contextlib
import functools
import random
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

SCHEDULES = ("late", "early", "random", "eager")
GARBAGE = 0xFB


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
    lane: Lane  # which allocated it
    shape: Any = None  # which torch's hold on it refers to
    users: set[Lane] = field(default_factory=set)  # other lanes


def locked(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def inner(self: Queues, *args: Any, **kwargs: Any) -> Any:
        with self.lock:
            return function(self, *args, **kwargs)

    return inner


@contextlib.contextmanager
def below_everything() -> Iterator[None]:
    """A context in which nobody sees the ops on the CPU that stand for those on the device."""
    hidden = torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction(), torch._C._DisableAutocast()
    with hidden[0], hidden[1], hidden[2], torch._C._AutoDispatchBelowAutograd():
        yield


class Queues:
    """The streams of one device: what they are still to run, and when on the virtual clock they would have."""

    def __init__(self, schedule: str, seed: int, duration: Callable[[Work], float]) -> None:
        assert schedule in SCHEDULES
        self.schedule, self.random, self.duration = schedule, random.Random(seed), duration
        self.lock = threading.RLock()
        self.lanes: list[Lane] = []
        self.deferred: list[tuple[Block, list[Mark]]] = []  # freed, but in use on other lanes
        self.blocks: dict[int, Block] = {}  # by address
        self.allocated = self.peak = self.synchronisations = 0
        self.host_time, self.engines, self.log = 0.0, {"compute": 0.0, "to_host": 0.0, "to_device": 0.0}, list[Entry]()
        self.new_lane()

    @locked
    def new_lane(self) -> Lane:
        self.lanes.append(Lane(len(self.lanes), self.random.choice([0.02, 0.2, 0.5, 0.9])))
        return self.lanes[-1]

    # -- queueing

    @locked
    def enqueue(self, lane: Lane, run: Callable[[], None], work: Work) -> None:
        """Queue an op, and let the schedule run what it likes."""
        self.settle()
        start = max(lane.time, self.host_time, self.engines[work.kind])
        lane.time = self.engines[work.kind] = start + self.duration(work)
        self.log.append(Entry(lane.index, work.name, start, lane.time))
        lane.tasks.append(Task(run))
        self.progress()

    @locked
    def mark(self, lane: Lane) -> Mark:
        """Queue a point that can be waited for."""
        self.settle()
        mark = Mark(lane, max(lane.time, self.host_time))
        lane.tasks.append(Task(functools.partial(self.reach, mark)))
        self.progress()
        return mark

    @locked
    def wait(self, lane: Lane, mark: Mark) -> None:
        """Let what `lane` is given from now on run after `mark`."""
        self.settle()
        lane.time = max(lane.time, mark.time)
        lane.tasks.append(Task(lambda: None, after=mark))
        self.progress()

    def freed(self) -> list[int]:
        """Return the addresses that torch let go of since the last call."""
        raise NotImplementedError

    @locked
    def settle(self) -> None:
        """Queue the end of the blocks that were freed since the last call."""
        for address in self.freed():
            block = self.blocks.pop(address)
            self.allocated -= block.memory.numel()
            marks = []
            for lane in sorted(block.users - {block.lane}, key=lambda lane: lane.index):
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
        with below_everything():
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

    @locked
    def query(self, mark: Mark) -> bool:
        """Return whether `mark` was reached. To ask runs one entry, so that asking in a loop comes to an end."""
        if not (done := mark.done):
            self.step(mark.lane)
        return done

    @locked
    def is_idle(self, lane: Lane) -> bool:
        """Return whether `lane` has run all it was given, as `query`."""
        self.settle()
        idle = not lane.tasks
        if not idle:
            self.step(lane)
        return idle

    @locked
    def synchronize(self, *marks: Mark) -> None:
        """Let the host wait for `marks`."""
        self.synchronisations += 1
        self.progress()
        for mark in marks:
            self.run_until(mark)
            self.host_time = max(self.host_time, mark.time)

    # -- memory

    @locked
    def new_block(self, lane: Lane, nbytes: int) -> Block:
        """Return new memory, to which its last user on this lane may still write."""
        self.settle()
        block = Block(torch.full((max(nbytes, 1),), GARBAGE, dtype=torch.uint8), lane)
        self.blocks[block.memory.data_ptr()] = block
        self.allocated += block.memory.numel()
        self.peak = max(self.peak, self.allocated)
        lane.tasks.append(Task(functools.partial(block.memory.fill_, GARBAGE)))
        return block

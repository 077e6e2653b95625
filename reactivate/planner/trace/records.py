"""The memory of a step, op by op: what is alive, in which block, and when it goes.

Time is divided by the calls of the model's units (its blocks): position 2k+1 is the call of the k-th unit, 2k is what
runs before it and after the one before. The backward of an op belongs where its forward was: autograd's nodes are
numbered in the order in which they were made.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from reactivate.storage.rehearsal import MoveKind


class Cost(NamedTuple):
    """The cost of an op.

    Attributes:
        seconds: how long it takes.
        top_bytes: the most that is allocated while it runs, its results among it; 0 if that is not known.
        result_bytes: the memory behind each tensor that it returns, where a kernel takes more than the tensor needs.
        group: the name of the process group that it talks to; empty if it talks to none.
    """

    seconds: float
    top_bytes: int = 0
    result_bytes: tuple[int, ...] = ()
    group: str = ""


class Costs(Protocol):
    """A source of the cost of ops.

    Attributes:
        rounding: the allocator gives multiples of this many bytes.
        has_streams: whether collectives run beside compute, where the step says so.
    """

    rounding: int
    has_streams: bool

    def of(self, op: Any, args: Any, kwargs: Any, result: Any) -> Cost:
        """The cost of one call."""


class Op(NamedTuple):
    """An op that ran.

    Attributes:
        turn: which pass over the model it belongs to: micro-batches are several.
        position: which unit (odd), or between which (even).
        is_backward: whether the backward runs.
        is_recomputation: whether a region is recomputed.
        start_bytes: what was alive before.
        top_bytes: the most that was alive while it ran.
        live_bytes: what is alive afterwards.
        seconds: by how much the step is longer with it: nothing for what runs beside compute.
        name: the op.
    """

    turn: int
    position: int
    is_backward: bool
    is_recomputation: bool
    start_bytes: int
    top_bytes: int
    live_bytes: int
    seconds: float
    name: str = ""


class Origin(NamedTuple):
    """The origin of a storage.

    Attributes:
        op: what made it.
        module: the path of the innermost module that ran then; empty where none did.
        shape, dtype: of the tensor that was made.
    """

    op: str
    module: str = ""
    shape: tuple[int, ...] = ()
    dtype: str = ""


UNKNOWN = Origin("")
SUM_IN_PLACE = "add_ of gradients"
"""The name of an op that is out of place only because it is traced."""


@dataclass
class Allocation:
    """A storage.

    Attributes:
        size_bytes: its size.
        born, died: the numbers of the ops before which it was made and freed; None while it is alive.
        origin: what made it.
        place: the path of the module for which that ran: in the backward, of the one whose gradients are computed.
    """

    size_bytes: int
    born: int
    died: int | None = None
    origin: Origin = UNKNOWN
    place: str = ""


class CopyEvent(NamedTuple):
    """A transfer to or from a storage, as far as it has come.

    Attributes:
        op: the number of the op before which that was.
        what: "taken" into the storage, "sent" to it, "settled" once its memory is free, "fetched", "read".
        key: which tensor.
        nbytes: its size.
    """

    op: int
    what: MoveKind
    key: int
    nbytes: int


@dataclass
class UnitCall:
    """The call of a unit.

    Attributes:
        path: the unit.
        live_bytes: what was alive when it began.
        op: the number of the op before which that was.
        functions: how often it called each of torch's functions, where that was asked for.
        regions, saved_tensors, saved_calls: how many there were in it, for what the engine itself takes.
        moved: the bytes of each tensor of it that a storage took.
        has_gradients: whether gradients were enabled: otherwise there is nothing to treat.
    """

    path: str
    live_bytes: int
    functions: Counter[str] = field(default_factory=Counter)
    regions: int = 0
    saved_tensors: int = 0
    saved_calls: int = 0
    moved: list[int] = field(default_factory=list)
    has_gradients: bool = True
    op: int = 0


@dataclass
class Trace:
    """One step.

    Attributes:
        ops: every op, in order.
        costs: of each op, one object for ops that are alike.
        calls: of the units, in order, for each pass over the model.
        allocations: every memory of a tensor.
        moves: every transfer to and from a storage, in order.
        stored_bytes: the most that the storage keeps.
        failures: why the storage could not do its part, or which regions are left out.
        refused: the paths of the regions that cannot be recomputed: what they are given is written to, and no copy is there.
        checkpointed: the paths of the units that a checkpoint of another library calls again in the backward.
        of_data: the paths of the modules that computed something whose size, or whose meaning for Python, is in the numbers
            of tensors; "" for the model itself, or outside of it.
        margin_bytes: what is to be left free beside its peak, for batches with other sizes there.
        is_real: whether it ran for real.
        standing: the bytes of each memory that was there before.
        rounding: the allocator gives multiples of this many bytes.
        collective_seconds: what collectives take, where they run beside compute; 0 where they do not.
        waited_seconds: what of that compute waits for.
    """

    ops: list[Op] = field(default_factory=list)
    costs: list[Cost] = field(default_factory=list)
    calls: list[list[UnitCall]] = field(default_factory=list)
    allocations: list[Allocation] = field(default_factory=list)
    checkpointed: set[str] = field(default_factory=set)
    of_data: set[str] = field(default_factory=set)
    margin_bytes: int = 0
    is_real: bool = False
    moves: list[CopyEvent] = field(default_factory=list)
    stored_bytes: int = 0
    failures: list[str] = field(default_factory=list)
    refused: set[str] = field(default_factory=set)
    standing: list[int] = field(default_factory=list)
    rounding: int = 1
    collective_seconds: float = 0.0
    waited_seconds: float = 0.0

    def fits(self, budget_bytes: int) -> bool:
        """Return whether the step is as it should be, and within the budget."""
        return not self.failures and self.needed_bytes <= budget_bytes

    @property
    def needed_bytes(self) -> int:
        """The most that was alive, with what is to be left free beside it."""
        return self.peak_bytes + self.margin_bytes

    @property
    def peak_bytes(self) -> int:
        """The most that was alive, above what there was before the step."""
        return max((op.top_bytes for op in self.ops), default=0)

    @property
    def seconds(self) -> float:
        """Return the seconds of all ops."""
        return sum(op.seconds for op in self.ops)

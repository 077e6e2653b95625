"""The prediction of a plan: memory over time, its peak and what that is made of, time. No torch."""

from __future__ import annotations

from dataclasses import dataclass

MOST_MOMENTS = 400


@dataclass(frozen=True)
class Fixed:
    """Bytes that are there before the step, and all the time.

    Attributes:
        parameters: with buffers.
        gradients: of all parameters that have one.
        optimizer: its state.
        inputs: what the model is called with.
        others: what else is on an accelerator: other tensors, and what its libraries take for their work.
    """

    parameters: int
    gradients: int
    optimizer: int
    inputs: int
    others: int = 0

    @property
    def total(self) -> int:
        """All of it."""
        return self.parameters + self.gradients + self.optimizer + self.inputs + self.others


@dataclass(frozen=True)
class LiveBytes:
    """The memory that a step has allocated beyond `Fixed`, at one moment.

    Attributes:
        seconds: since the step began.
        kept: bytes of what the forward pass keeps for the backward.
        recomputed: bytes of what was recomputed.
        workspace: bytes of all else: values on the way, gradients of them, what kernels take for themselves.
    """

    seconds: float
    kept: int
    recomputed: int
    workspace: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.kept + self.recomputed + self.workspace


@dataclass(frozen=True)
class LiveTensors:
    """Tensors that are alive at the peak: made by one op of one module, of one shape, in one or several units.

    Attributes:
        op: what made them.
        module: the path of the module that ran it, in a unit "*" and the path below; empty where that is not known.
        shape, dtype: of each.
        kind: what they are for: "kept", "recomputed" or "workspace", as in `LiveBytes`.
        held_by: the units in whose backward, or forward, they are freed, each once; see `planner.cost.alive`.
        count: how many there are.
        nbytes: of all of them.
    """

    op: str
    module: str
    shape: tuple[int, ...]
    dtype: str
    kind: str
    held_by: tuple[str, ...]
    count: int
    nbytes: int


@dataclass(frozen=True)
class Copy:
    """A tensor on its way to a storage, or back.

    Attributes:
        begin_seconds, end_seconds: since the step began.
        nbytes: its size.
        is_back: whether it comes back.
    """

    begin_seconds: float
    end_seconds: float
    nbytes: int
    is_back: bool


@dataclass(frozen=True)
class Prediction:
    """A step under one policy.

    Attributes:
        peak_bytes: the most that is allocated, `Fixed` included.
        seconds: of forward and backward.
        moments: its memory over time, some 400 of them; the peak is among them.
        forward_seconds: when the forward pass ends.
        copies: the transfers to and from a storage.
        waited_seconds: how long the step waits for these; a part of `seconds`.
        alive: the tensors of which the peak is made beside `Fixed`, the largest first; none in older files.
        reserved_bytes: what an accelerator's allocator reserves for all that; None for a CPU, and in older files.
    """

    peak_bytes: int
    seconds: float
    forward_seconds: float
    moments: tuple[LiveBytes, ...]
    copies: tuple[Copy, ...] = ()
    waited_seconds: float = 0.0
    alive: tuple[LiveTensors, ...] = ()
    reserved_bytes: int | None = None

    @property
    def peak(self) -> LiveBytes:
        """The moment of the most memory."""
        return max(self.moments, key=lambda moment: moment.total)


@dataclass(frozen=True)
class Point:
    """A choice between memory and time.

    Attributes:
        label: "planned" for one that the solver found, with the name of the storage if it uses one; of a fixed policy, as it
            is written.
        peak_bytes, seconds: as in `Prediction`.
    """

    label: str
    peak_bytes: int
    seconds: float


@dataclass(frozen=True)
class Proof:
    """The way in which it was seen that a plan holds.

    Attributes:
        method: "simulated": the whole step ran on fake tensors; "real": it ran; "compiled": it ran under torch.compile.
        peak_bytes: what was seen.
        rounds: how many plans were tried until one held.
        margin_bytes: what the budget leaves free for other batches: with their values the sizes in the model change.
    """

    method: str
    peak_bytes: int
    rounds: int
    margin_bytes: int = 0


def thinned(moments: list[LiveBytes]) -> tuple[LiveBytes, ...]:
    """Of many moments the highest of each stretch, and the first and the last."""
    stretch = -(-len(moments) // MOST_MOMENTS)
    if stretch <= 1:
        return tuple(moments)
    parts = (moments[start : start + stretch] for start in range(0, len(moments), stretch))
    return (moments[0], *(max(part, key=lambda moment: moment.total) for part in parts), moments[-1])

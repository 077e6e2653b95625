"""The contents of a plan: what was decided, for which circumstances, and what that predicts. Reports read nothing else."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from reactivate.planner.candidates import Candidate

MOST_MOMENTS = 400


# -- a prediction -----------------------------------------------------------------------------------------------------


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


class LiveBytes(NamedTuple):
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


class Copy(NamedTuple):
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
        collective_seconds: what the collectives of a simulated step take on a device that is not here; else 0.
        hidden_seconds: what of that runs beside compute, so that it is no part of `seconds`.
    """

    peak_bytes: int
    seconds: float
    forward_seconds: float
    moments: tuple[LiveBytes, ...] = field(repr=False)
    copies: tuple[Copy, ...] = field(default=(), repr=False)
    waited_seconds: float = 0.0
    alive: tuple[LiveTensors, ...] = field(default=(), repr=False)
    reserved_bytes: int | None = None
    collective_seconds: float = 0.0
    hidden_seconds: float = 0.0

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


# -- a plan -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Decision:
    """The decision on a unit of the model.

    Attributes:
        path: of the module.
        kind: the name of its class.
        parameters: a digest of the names, shapes and dtypes of its parameters.
        candidate: what is done.
        held_bytes: what is alive after its forward, until its backward begins, and was not before.
        seconds: how much longer the step takes by it, without waiting for copies.
        moved_bytes: what of it a storage keeps meanwhile.
    """

    path: str
    kind: str
    parameters: str
    candidate: Candidate = field(metadata={"key": "treatment"})
    held_bytes: int
    seconds: float
    moved_bytes: int = 0


@dataclass(frozen=True)
class StorageUse:
    """A storage that a plan uses.

    Attributes:
        name: what candidates call it.
        written: the storage, as it is written.
        stored_bytes: the most that it keeps.
        out_bytes_per_second, back_bytes_per_second: how fast it was taken to be; None where its copies are ops like others.
        arguments: what makes it again; None for a class that is not of this package.
    """

    name: str
    written: str
    stored_bytes: int
    out_bytes_per_second: float | None
    back_bytes_per_second: float | None
    arguments: dict[str, Any] | None = field(default=None, hash=False, metadata={"key": "spelled"})


@dataclass(frozen=True)
class Circumstances:
    """The circumstances that a plan was made for.

    Attributes:
        model: the name of its class.
        inputs: (name, shape, dtype) of the tensors that it is called with.
        device: where it runs.
        torch: the version.
        loss: what the backward begins from, in words.
        is_predicted: whether nothing ran: times are those of a roofline, and what kernels allocate for themselves is not
            counted.
        units: how many blocks, and other modules that contain modules, the model had; 0 in older files.
        trains: whether the model was in training mode, and not in `eval()`; true in older files.
        idle_units: how many of the units did not run in the step.
    """

    model: str
    inputs: tuple[tuple[str, tuple[int, ...], str], ...]
    device: str
    torch: str
    loss: str
    is_predicted: bool
    units: int = 0
    trains: bool = True
    idle_units: int = 0

    @property
    def mode(self) -> str:
        """Return the mode of the model, in words."""
        return "training mode" if self.trains else "eval() mode"


@dataclass(frozen=True, repr=False)
class PlanContents:
    """The decisions of a plan, with the prediction that they were chosen by.

    Attributes:
        budget: as it was asked for.
        budget_bytes: in bytes, all included.
        made_for: the model, the inputs, the device.
        decisions: what is done with each block.
        fixed: what is allocated all the time.
        plain: the step without a policy.
        predicted: the step with this plan.
        frontier: the plans for other budgets, from the least feasible.
        policies: fixed policies, for comparison.
        proof: how it was seen that the plan holds.
        optimizer_bytes: the most that is allocated while the optimizer steps, all included; 0 if none was given.
        planning_seconds: what planning took.
        largest: the size of the dimension that was maximized, or None.
        device_bytes: the memory of the device, all of it; 0 if unknown, and in older files.
        storages: those that it uses.
        offered: those that it might have used, as they are written.
        uncertainty: by which part of it the time of the step was another when it was measured again; 0 where nothing ran, and
            in older files.
    """

    budget: str
    budget_bytes: int
    made_for: Circumstances
    decisions: tuple[Decision, ...]
    fixed: Fixed
    plain: Prediction
    predicted: Prediction
    frontier: tuple[Point, ...]
    policies: tuple[Point, ...]
    proof: Proof
    optimizer_bytes: int = 0
    planning_seconds: float = 0.0
    largest: int | None = None
    device_bytes: int = 0
    storages: tuple[StorageUse, ...] = ()
    offered: tuple[str, ...] = ()
    uncertainty: float = 0.0

    @property
    def peak_bytes(self) -> int:
        """The most that is allocated at any moment, all included: at most the budget."""
        return max(self.predicted.peak_bytes, self.optimizer_bytes)

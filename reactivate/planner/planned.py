"""The contents of a plan: what was decided, for which circumstances, and what that promises. Reports read nothing else."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from reactivate.planner.cost.prediction import Fixed, Point, Prediction, Proof
from reactivate.planner.treatments import Treatment


@dataclass(frozen=True)
class Decision:
    """The decision on a unit of the model.

    Attributes:
        path: of the module.
        kind: the name of its class.
        parameters: a digest of the names, shapes and dtypes of its parameters.
        treatment: what is done.
        held_bytes: what is alive after its forward, until its backward begins, and was not before.
        seconds: how much longer the step takes by it, without waiting for copies.
        moved_bytes: what of it a storage keeps meanwhile.
    """

    path: str
    kind: str
    parameters: str
    treatment: Treatment
    held_bytes: int
    seconds: float
    moved_bytes: int = 0


@dataclass(frozen=True)
class StorageUse:
    """A storage that a plan uses.

    Attributes:
        name: what treatments call it.
        written: the storage, as it is written.
        stored_bytes: the most that it keeps.
        out_bytes_per_second, back_bytes_per_second: how fast it was taken to be; None where its copies are ops like others.
        spelled: what makes it again; None for a storage of somebody's own.
    """

    name: str
    written: str
    stored_bytes: int
    out_bytes_per_second: float | None
    back_bytes_per_second: float | None
    spelled: dict[str, Any] | None = field(default=None, hash=False)


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
class Planned:
    """The decisions of a plan, with the promise that they were chosen for.

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
        device_bytes: the memory of the device, all of it; 0 where nobody says, and in older files.
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

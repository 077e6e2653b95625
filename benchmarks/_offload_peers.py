"""Ways to keep activations off a device, each for steps of one model.

On the simulated device a clock runs as the streams of a device would: a matrix product takes a second, and the copy of a
region's input half of the time of the region's forward. On a GPU it is the clock of the wall. Bytes are those of the device.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib import import_module
from time import perf_counter
from typing import Any, NamedTuple

import torch
from residual import Block, Residual
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu

import reactivate
from reactivate import policies
from reactivate.storage import Disk, Host


class Target(NamedTuple):
    """A device on which ways are measured.

    Attributes:
        module: of the device.
        enter: a context with the device.
        clock: () -> seconds, when all that was queued is done.
        copied: () -> seconds of all copies so far; None if nobody knows.
        width, rows: sizes of the model and of its batch.
    """

    module: Any
    enter: Callable[[], AbstractContextManager[torch.device]]
    clock: Callable[[], float]
    copied: Callable[[], float] | None
    width: int
    rows: int


class Way(NamedTuple):
    """A way to train a model.

    Attributes:
        change: what it makes of the model.
        around: the context of a forward.
        takes_time: whether the clock of the device knows of all that it does.
    """

    change: Callable[[nn.Module], nn.Module]
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    takes_time: bool = True


def on_simulated(layers: int) -> list[dict[str, Any]]:
    """Return the rows of the simulated device."""
    import simulated

    width, rows = 16, 256

    def duration(work: Any) -> float:
        if work.kind != "compute":
            return float(work.nbytes) / (width * rows * 4)
        return float("linear" in work.name or "mm" in work.name)

    @contextmanager
    def enter() -> Iterator[torch.device]:
        with simulated.accelerator("eager", 0, duration) as device, _pinning(simulated.pin):
            yield device

    def copied() -> float:
        return sum(entry.end - entry.start for entry in simulated.log() if "to_" in entry.name)

    return peers(Target(simulated, enter, simulated.elapsed, copied, width, rows), simulated.NAME, layers, steps=2)


def on_gpu(
    device: torch.device, layers: int, steps: int, width: int = 1024, batch: int = 16384
) -> list[dict[str, Any]]:
    """Return the rows of a GPU."""

    def clock() -> float:
        torch.cuda.synchronize(device)
        return perf_counter()

    return peers(Target(torch.cuda, lambda: nullcontext(device), clock, None, width, batch), "cuda", layers, steps)


@contextmanager
def _pinning(pin: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Let `torch.empty(pin_memory=True)` pin memory for a device that torch has no allocator of such memory for."""
    empty = torch.empty

    def pinned(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Tensor:
        found = empty(*args, **kwargs)
        return pin(found) if pin_memory else found

    torch.empty = pinned  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.empty = empty


def peers(place: Target, device_type: str, layers: int, steps: int) -> list[dict[str, Any]]:
    """Return a row for each way: bytes and seconds, or why it did not run."""
    torch.manual_seed(0)
    states = Residual(place.width, layers).state_dict()
    rows: list[dict[str, Any]] = []
    expected: list[Tensor] = []
    with tempfile.TemporaryDirectory() as path:
        for name, way in _ways(device_type, path).items():
            model = Residual(place.width, layers)
            model.load_state_dict(states)
            try:
                row = _measured(place, way, model, expected, steps)
            except ImportError:
                row = {"why": "not installed"}
            except Exception as error:  # a peer may fail in any way: the row says which
                row = {"why": f"{type(error).__name__}: {str(error).splitlines()[0]}"}
            rows.append({"way": name, **row})
    return rows


def _ways(device_type: str, path: str) -> dict[str, Way]:
    host = Host(least_bytes=0)
    disk = Disk(path, least_bytes=0)
    return {
        "plain": Way(lambda model: model),
        "regions, inputs on the device": Way(_applied(policies.full())),
        "regions, inputs on the host": Way(_applied(policies.full(inputs=host))),
        "regions, inputs on a disk": Way(_applied(policies.full(inputs=disk)), takes_time=False),
        "`save_on_cpu`, plain model": Way(lambda model: model, lambda: save_on_cpu(True, device_type)),
        "`save_on_cpu`, regions": Way(_applied(policies.full()), lambda: save_on_cpu(True, device_type)),
        "transformers, `offload=True`": Way(_of_transformers),
        "torchtune, `OffloadActivations`": Way(_applied(policies.full()), _of_torchtune),
    }


def _applied(policy: Any) -> Callable[[nn.Module], nn.Module]:
    def change(model: nn.Module) -> nn.Module:
        reactivate.apply(model, policy, check="metadata")
        return model

    return change


def _of_torchtune() -> AbstractContextManager[Any]:
    context: AbstractContextManager[Any] = import_module("torchtune.training").OffloadActivations()
    return context


def _of_transformers(model: nn.Module) -> nn.Module:
    """Return the model as one of transformers', with its own option on."""
    library = import_module("transformers")
    layer_class = import_module("transformers.modeling_layers").GradientCheckpointingLayer

    class Layer(layer_class):  # type: ignore[misc, valid-type]
        def __init__(self, block: Block) -> None:
            super().__init__()
            self.body = block.body

        def forward(self, x: Tensor) -> Tensor:
            return x + self.body(x)

    class Model(library.PreTrainedModel):  # type: ignore[misc, name-defined]
        supports_gradient_checkpointing = True
        main_input_name = "x"

        def __init__(self) -> None:
            super().__init__(library.PretrainedConfig())
            self.first = model.first
            self.layers = nn.ModuleList(map(Layer, model.layers))

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            for layer in self.layers:
                x = layer(x)
            return x

    found = Model().train()
    found.activation_checkpointing_enable(offload=True)
    return found


def _measured(place: Target, way: Way, model: nn.Module, expected: list[Tensor], steps: int) -> dict[str, Any]:
    """Return the row of a way; the first one fills `expected` with the gradients."""
    module, batch = place.module, torch.randn(place.rows, place.width, generator=torch.Generator().manual_seed(1))
    seconds, copied = [], 0.0
    with place.enter() as device:
        model, inputs = way.change(model.to(device)), batch.to(device)
        for _ in range(steps + 1):  # the first step finds out about the model
            model.zero_grad()
            before, start, copied = module.memory_allocated(), place.clock(), place.copied() if place.copied else 0.0
            module.reset_peak_memory_stats()
            with way.around():
                loss = model(inputs).sum()
            resident = module.memory_allocated() - before
            loss.backward()
            seconds.append(place.clock() - start)
            peak = module.max_memory_allocated() - before
            copies = {"copies": place.copied() - copied} if place.copied and way.takes_time else {}
            del loss
        gradients = [parameter.grad.cpu() for parameter in model.parameters() if parameter.grad is not None]
    expected += gradients if not expected else []
    if not all(map(torch.equal, gradients, expected)):
        return {"why": "other gradients than the plain model's"}
    is_timed = way.takes_time or place.copied is None
    times = {"seconds": statistics.median(seconds[1:])} if is_timed else {}
    return {"resident": resident, "peak": peak, **times, **copies}


HEADER = ("way", "bytes after the forward", "peak bytes", "step", "the step and its copies, one after the other")


def cells(rows: list[dict[str, Any]], unit: str) -> list[tuple[str, ...]]:
    """Return the rows as text."""
    return [
        (row["way"], f"not run: {row['why']}", "", "", "")
        if "why" in row
        else (row["way"], f"{row['resident']:,}", f"{row['peak']:,}", *_times(row, rows, unit))
        for row in rows
    ]


def _times(row: dict[str, Any], rows: list[dict[str, Any]], unit: str) -> tuple[str, str]:
    if "seconds" not in row:
        return "", ""
    regions = next(other["seconds"] for other in rows if other["way"] == "regions, inputs on the device")
    apart = f"{regions + row['copies']:.0f} {unit}" if row.get("copies") and "regions" in row["way"] else ""
    digits = 0 if "copies" in row else 4
    return f"{row['seconds']:.{digits}f} {unit}", apart

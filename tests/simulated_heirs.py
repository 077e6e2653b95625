"""Devices of torch's own that follow XLA: torch_tpu's ("tpu") and Neuron's ("neuron"), simulated with their device modules.

Neither can be run without the hardware. So the simulated accelerator takes the name of one, and gets a device module that
does what theirs is published to do. `torch.tpu` (0.2.0) lets only torch call most of its functions, has its generators in
`default_generators`, and `torch.tpu.ops.optimization_barrier`. `torch.neuron` has the functions that `torch.cuda` has.
Both run ops later than they are called, as the simulated accelerator does.

`test_simulated` runs this in a process of its own for each, with the name in SIMULATED_DEVICE.
"""

from __future__ import annotations

import copy
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import simulated
import torch
import torch.utils.checkpoint
from oracle import Watched
from torch import Tensor, nn

import reactivate
from reactivate._backends import accelerator
from reactivate._passes.observing import observed_by
from reactivate.errors import UnsupportedError
from reactivate.guards import RngTracker
from reactivate.integrations import register_fence

NAME = simulated.NAME
is_tpu = NAME == "tpu"
only_tpu = pytest.mark.skipif(not is_tpu, reason="torch_tpu's interface")
SCHEDULES = ["late", "early", "random"]

barriers: list[int] = []
"""How many tensors each optimization barrier was given."""


def from_torch_only(function: Callable[..., Any]) -> Callable[..., Any]:
    """Refuse calls that do not come from torch, by the module of the caller: so does torch_tpu."""

    def guarded(*args: Any, **kwargs: Any) -> Any:
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if caller.partition(".")[0] != "torch":
            raise RuntimeError(f"{function.__name__} is internal and can only be called by the framework.")
        return function(*args, **kwargs)

    return guarded


def optimization_barrier(inputs: Sequence[Tensor]) -> list[Tensor]:
    return getattr(torch.ops, NAME)._optimization_barrier(inputs)  # type: ignore[no-any-return]


class TpuModule(types.ModuleType):
    """`torch.tpu`, as far as a checkpoint may come to it."""

    is_initialized = staticmethod(simulated.is_initialized)
    manual_seed = manual_seed_all = staticmethod(simulated.manual_seed)
    get_amp_supported_dtype = staticmethod(simulated.get_amp_supported_dtype)
    _is_in_bad_fork = staticmethod(simulated._is_in_bad_fork)
    is_available = staticmethod(from_torch_only(simulated.is_available))
    device_count = staticmethod(from_torch_only(simulated.device_count))
    current_device = staticmethod(from_torch_only(simulated.current_device))
    current_stream = staticmethod(from_torch_only(simulated.current_stream))
    device = staticmethod(from_torch_only(simulated.device))
    get_rng_state = staticmethod(from_torch_only(simulated.get_rng_state))
    set_rng_state = staticmethod(from_torch_only(simulated.set_rng_state))
    ops = types.SimpleNamespace(optimization_barrier=optimization_barrier)
    _initialized = True

    @property
    def default_generators(self) -> tuple[torch.Generator, ...]:
        return (simulated._active().generator,)


class NeuronModule(types.ModuleType):
    """`torch.neuron`: no function needs a device, and states can be had of any."""

    def __getattr__(self, name: str) -> Any:
        if name in ("is_available", "device_count", "current_device", "current_stream", "device", "stream"):
            return getattr(simulated, name)
        if name in ("is_initialized", "get_rng_state", "set_rng_state", "manual_seed", "manual_seed_all"):
            return getattr(simulated, name)
        if name in ("_is_in_bad_fork", "get_amp_supported_dtype"):
            return getattr(simulated, name)
        raise AttributeError(name)


module: Any = (TpuModule if is_tpu else NeuronModule)(f"torch.{NAME}")
setattr(torch, NAME, module)
sys.modules[f"torch.{NAME}"] = module


def _barrier(inputs: list[Tensor]) -> list[Tensor]:
    barriers.append(len(inputs))
    return [tensor.clone() for tensor in inputs]


library = torch.library.Library(NAME, "DEF")
library.define("_optimization_barrier(Tensor[] inputs) -> Tensor[]")
library.impl("_optimization_barrier", _barrier, "PrivateUse1")


def fence(tensors: list[Tensor]) -> list[Tensor]:
    """The fence that docs/xla.md registers."""
    barrier = torch.tpu.ops.optimization_barrier if is_tpu else optimization_barrier
    return barrier([tensor.detach() for tensor in tensors])  # type: ignore[no-any-return]


@pytest.fixture(autouse=True)
def no_barriers_yet() -> None:
    barriers.clear()


@pytest.fixture
def behind_barriers() -> Iterator[None]:
    register_fence(NAME, fence)
    yield
    register_fence(NAME, None)


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(width, 2 * width), nn.Linear(2 * width, width), nn.LayerNorm(width)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + nn.functional.dropout(self.down(torch.tanh(self.up(self.norm(x)))), 0.5)


def plain(fn: Any) -> Any:
    return fn


def trained(wrap: Callable[[Any], Any], first: nn.Module, inputs: Tensor, device: torch.device) -> list[Tensor]:
    """Train for three steps from one seed; return what came of it, the state of the random numbers included."""
    simulated.manual_seed(5)
    model, x = copy.deepcopy(first).to(device), inputs.to(device).requires_grad_()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for _ in range(3):
        y = x
        for block in model:
            y = wrap(block)(y)
        loss = y.square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    found = [*losses, x.grad, *model.parameters(), *model.buffers(), torch.rand(4, device=device)]
    return [tensor.detach().cpu() for tensor in found]


def model() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(3))), torch.randn(4, 8)


def assert_same(first: list[Tensor], second: list[Tensor]) -> None:
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def test_the_device_is_torchs_accelerator() -> None:
    with simulated.accelerator():
        found = accelerator()
        assert found is not None
        assert (found.device_type, found.is_initialized()) == (NAME, True)
        assert type(found).__name__ == ("TpuBackend" if is_tpu else "Backend")


@only_tpu
@pytest.mark.parametrize("name", ["is_available", "device_count", "current_device", "current_stream", "get_rng_state"])
def test_the_stand_in_refuses_others_than_torch(name: str) -> None:
    with simulated.accelerator(), pytest.raises(RuntimeError, match="internal"):
        getattr(module, name)()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_training_is_bitwise(schedule: str) -> None:
    first, inputs = model()
    ran = Watched()
    with simulated.accelerator(schedule) as device:
        before = trained(plain, first, inputs, device)
        with observed_by(ran):
            after = trained(reactivate.checkpoint, first, inputs, device)
    assert (ran.regions, ran.recomputations) == (9, 9)
    assert barriers == []
    assert_same(before, after)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_training_behind_the_devices_barrier_is_bitwise(schedule: str, behind_barriers: None) -> None:
    first, inputs = model()
    with simulated.accelerator(schedule) as device:
        before = trained(plain, first, inputs, device)
        assert barriers == []
        after = trained(reactivate.checkpoint, first, inputs, device)
    assert barriers == [1 + 1 + 6] * 9, (
        "in each recomputation the gradient, the input, parameters; no buffer: it is a vector"
    )
    assert_same(before, after)


@pytest.mark.parametrize("is_fenced", [False, True])
def test_torchs_function_with_the_drop_in_installed(is_fenced: bool, whole_heap: None) -> None:
    def torchs(block: Any) -> Any:
        return lambda x: torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)

    first, inputs = model()
    register_fence(NAME, fence if is_fenced else None)
    try:
        with simulated.accelerator() as device:
            before = trained(plain, first, inputs, device)
            with reactivate.dropin.install():
                after = trained(torchs, first, inputs, device)
    finally:
        register_fence(NAME, None)
    assert bool(barriers) == is_fenced
    assert_same(before, after)


def test_named_streams_of_random_numbers() -> None:
    """`RngTracker` reads and sets the generator of the current device."""
    with simulated.accelerator() as device:
        simulated.manual_seed(3)
        streams = RngTracker()
        streams.add("tensor parallel", 7)
        untouched = torch.rand(4, device=device).cpu()
        with streams.fork("tensor parallel"):
            inside = torch.rand(4, device=device).cpu()
        simulated.manual_seed(3)
        assert torch.equal(torch.rand(4, device=device).cpu(), untouched)
        torch.manual_seed(7)
        assert torch.equal(torch.rand(4, device=device).cpu(), inside)


def test_a_policy_keeps_what_it_says_behind_the_barrier(behind_barriers: None) -> None:
    first, inputs = model()
    policy = reactivate.policies.save_ops("linear")
    with simulated.accelerator() as device:
        before = trained(plain, first, inputs, device)
        after = trained(lambda block: reactivate.checkpoint(block, policy=policy), first, inputs, device)
    assert len(barriers) > 9
    assert_same(before, after)


# -- what is told of a model, and where a policy keeps tensors --------------------------------------------------------------


@pytest.fixture
def that_synchronizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch ask the simulator: it asks its own streams, which the simulated device does not have."""
    monkeypatch.setattr(torch.accelerator, "synchronize", simulated.synchronize)


@pytest.fixture
def that_counts(monkeypatch: pytest.MonkeyPatch, that_synchronizes: None) -> None:
    """Let torch ask the simulator for numbers of its allocator, too."""
    for name in ("memory_allocated", "reset_peak_memory_stats", "max_memory_allocated"):
        monkeypatch.setattr(torch.accelerator, name, getattr(simulated, name))
    monkeypatch.setattr(torch.accelerator, "max_memory_reserved", simulated.max_memory_allocated)


BLOCKS = reactivate.policies.recompute_modules(Block)


def saving(storage: Any) -> Any:
    return reactivate.policies.first_match(reactivate.policies.save_ops("tanh", storage=storage), BLOCKS)


@pytest.mark.parametrize(
    "policy", [None, BLOCKS, saving(reactivate.storage.Device())], ids=["whole", "blocks", "saving"]
)
def test_verify(policy: Any) -> None:
    first, inputs = model()
    with simulated.accelerator() as device:
        verdict = reactivate.verify(first.to(device), (inputs.to(device),), policy=policy)
    assert verdict, verdict
    assert verdict.recomputations == (1 if policy is None else 3)
    assert verdict.kept_bytes < verdict.plain_bytes


def test_explain_counts_as_on_the_cpu(that_synchronizes: None) -> None:
    found = []
    with simulated.accelerator() as device:
        for place in ("cpu", device):
            first, inputs = model()
            reactivate.apply(first.to(place), saving(reactivate.storage.Device()))
            regions = reactivate.explain(first, (inputs.to(place),)).regions
            found.append([(entry.path, entry.action, entry.input_bytes, entry.result_bytes) for entry in regions])
    assert len(found[0]) == 3
    assert found[0] == found[1]


STORAGES: dict[str, Callable[[Any], Any]] = {
    "host": lambda path: reactivate.storage.Host(least_bytes=1, last=0),
    "disk": lambda path: reactivate.storage.Disk(path, least_bytes=1, last=0),
}


@pytest.mark.parametrize("name", STORAGES)
def test_storages(name: str, tmp_path: Any) -> None:
    first, inputs = model()
    storage = STORAGES[name](tmp_path)
    with simulated.accelerator() as device:
        subject, x = first.to(device), inputs.to(device).requires_grad_()
        verdicts = [
            reactivate.verify(subject, (x * 1,), policy=policy)
            for policy in (saving(storage), reactivate.policies.recompute_modules(Block, inputs=storage))
        ]
    assert storage.traffic.moved > 0 and not storage.traffic.stayed
    for verdict in verdicts:
        assert verdict, verdict
        assert verdict.recomputations == 3


def test_a_plan(that_counts: None) -> None:
    first, inputs = model()
    with simulated.accelerator() as device:
        subject, x = first.to(device), inputs.repeat(64, 1).to(device)
        plan = reactivate.plan(subject, (x,), budget="80%")
        verdict = reactivate.verify(subject, (x,), policy=plan)
    assert verdict and verdict.recomputations > 0


def test_a_plan_is_refused_where_the_allocator_tells_no_numbers(that_synchronizes: None) -> None:
    first, inputs = model()
    with simulated.accelerator() as device:
        subject, x = first.to(device), inputs.to(device)
        with pytest.raises(UnsupportedError, match=rf"plan: the model is on {NAME}:0.*Plan a copy on the CPU"):
            reactivate.plan(subject, (x,), budget="80%")


def test_a_plan_of_a_copy(that_synchronizes: None) -> None:
    first, inputs = model()
    elsewhere = copy.deepcopy(first).to("meta"), inputs.repeat(64, 1).to("meta")
    plan = reactivate.plan(elsewhere[0], (elsewhere[1],), budget="80%", device="H100-SXM")
    with simulated.accelerator() as device:
        verdict = reactivate.verify(first.to(device), (inputs.repeat(64, 1).to(device),), policy=plan)
    assert verdict and verdict.recomputations > 0

"""On the simulated accelerator right programs give the CPU's bits, and racy ones do not.

`test_simulated` runs this in a process of its own.
"""

from __future__ import annotations

import copy
import functools
import gc
from collections.abc import Callable
from typing import Any

import pytest
import simulated
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn

import reactivate

RANDOM = [("random", seed) for seed in range(20)]
ALL = [("late", 0), ("early", 0), ("eager", 0), *RANDOM]
every_schedule = pytest.mark.parametrize(("schedule", "seed"), ALL, ids=lambda value: str(value))


# -- training ------------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """A transformer block whose attention is written out."""

    def __init__(self, width: int, heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.before(x)).unflatten(-1, (3, self.heads, -1)).transpose(1, 3).unbind(2)
        weights = F.dropout((q @ k.mT * q.shape[-1] ** -0.5).softmax(-1), self.dropout)
        x = x + self.out((weights @ v).transpose(1, 2).flatten(2))
        return x + self.mlp(self.between(x))


class Language(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 16)
        self.blocks = nn.Sequential(*(Block(16, 2, dropout) for _ in range(2)))

    def forward(self, tokens: Tensor) -> Tensor:
        return F.cross_entropy(
            (self.blocks(self.embedding(tokens)) @ self.embedding.weight.T).flatten(0, 1), tokens.flatten()
        )


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 12), nn.LayerNorm(12), nn.GELU(), nn.Linear(12, 12), nn.Softmax(-1))
        self.norm, self.convolution = nn.BatchNorm1d(12), nn.Conv1d(1, 2, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.convolution(self.norm(self.layers(x))[:, None]).square().mean()


def train(model: nn.Module, inputs: Tensor, optimizer: Callable[..., Any], **options: Any) -> list[Tensor]:
    """Train for three steps, and return all that came of it."""
    steps, losses = optimizer(model.parameters(), **options), []
    for step in range(3):
        steps.zero_grad()
        loss = model(inputs.roll(step, 0))
        loss.backward()
        steps.step()
        losses.append(loss.detach())
    return [*losses, *(value.detach() for value in model.state_dict().values())]


def perceptron() -> tuple[nn.Module, Tensor]:
    return Perceptron(), torch.randn(8, 6)


def language() -> tuple[nn.Module, Tensor]:
    return Language(), torch.randint(0, 11, (2, 5))


def same_bits(first: list[Tensor], second: list[Tensor]) -> bool:
    return all(torch.equal(one.cpu(), other.cpu()) for one, other in zip(first, second, strict=True))


@every_schedule
@pytest.mark.parametrize("make", [perceptron, language])
def test_training_gives_the_bits_of_the_cpu(make: Callable[[], Any], schedule: str, seed: int) -> None:
    model, inputs = make()
    plain = train(copy.deepcopy(model), inputs, torch.optim.SGD, lr=0.1, momentum=0.9)
    with simulated.accelerator(schedule, seed) as device:
        before = simulated.synchronisations
        model, inputs = model.to(device), inputs.to(device)
        moved = simulated.synchronisations
        ours = train(model, inputs, torch.optim.SGD, lr=0.1, momentum=0.9)
        assert before == 0 < moved == simulated.synchronisations, "training itself waits for nothing"
        assert same_bits(plain, ours)


@pytest.mark.parametrize(("schedule", "seed"), ALL[:5])
@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.Adagrad])
def test_other_optimizers(optimizer: Any, schedule: str, seed: int) -> None:
    model, inputs = perceptron()
    plain = train(copy.deepcopy(model), inputs, optimizer, foreach=False)
    with simulated.accelerator(schedule, seed) as device:
        assert same_bits(plain, train(model.to(device), inputs.to(device), optimizer, foreach=False))


def test_random_numbers_are_those_of_the_program_and_not_of_the_schedule() -> None:
    first, tokens = Language(dropout=0.5), torch.randint(0, 11, (2, 5))
    found = []
    for schedule, seed in ALL[:8]:
        with simulated.accelerator(schedule, seed) as device:
            torch.manual_seed(3)
            model = copy.deepcopy(first).to(device)
            results = [*train(model, tokens.to(device), torch.optim.SGD, lr=0.1), torch.randn(4, device=device)]
            state = torch.get_device_module(device).get_rng_state()
            drawn = torch.rand(4, device=device).cpu()
            torch.get_device_module(device).set_rng_state(state)
            assert torch.equal(torch.rand(4, device=device).cpu(), drawn)
            assert not torch.equal(torch.rand(4, device=device).cpu(), drawn)
            found.append([result.cpu() for result in results])
    assert all(same_bits(found[0], other) for other in found)


@pytest.mark.parametrize(("schedule", "seed"), ALL[:8])
def test_checkpointed_regions(schedule: str, seed: int) -> None:
    first, tokens = Language(dropout=0.5), torch.randint(0, 11, (2, 5))
    with simulated.accelerator(schedule, seed) as device:

        def once(wrap: Callable[..., Any]) -> list[Tensor]:
            simulated.manual_seed(5)
            model = copy.deepcopy(first).to(device)
            for block in model.blocks:
                block.forward = wrap(block.forward)
            model(tokens.to(device)).backward()
            return [parameter.grad.cpu() for parameter in model.parameters()]

        plain = once(lambda forward: forward)
        assert same_bits(plain, once(reactivate.checkpoint))
        torchs = functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=False)
        assert same_bits(plain, once(lambda forward: functools.partial(torchs, forward)))


# -- races ---------------------------------------------------------------------------------------------------------------


def round_trip(device: torch.device, mistake: str = "") -> Tensor:
    """Move activations to the host and back on side streams, with at most one mistake."""
    main, out, back = simulated.current_stream(), simulated.Stream(), simulated.Stream()
    inputs = torch.arange(64.0).to(device)
    slabs, outputs = [simulated.pin(torch.zeros(64)) for _ in range(4)], []
    for slab in slabs:
        inputs = inputs * 1.5 + 1
        activation = inputs.sin()
        if mistake != "copied before it was computed":
            out.wait_stream(main)
        with simulated.stream(out):
            slab.copy_(activation, non_blocking=True)
        if mistake != "freed before it was copied":
            activation.record_stream(out)
        del activation
    if mistake != "changed before it was written":
        out.synchronize()
    for index, slab in reversed(list(enumerate(slabs))):
        slab *= 2
        if index % 2:
            fetched = torch.empty(64, device=device)
            if mistake != "filled while its last user was at work":
                back.wait_stream(main)
        with simulated.stream(back):
            if not index % 2:
                fetched = torch.empty(64, device=device)
            fetched.copy_(slab, non_blocking=True)
        if mistake == "reused before it was read":
            slab.zero_()
        if mistake == "unpinned before it was read":
            simulated.unpin(slab)
        if mistake != "used before it was there":
            main.wait_stream(back)
        outputs.append(fetched * (index + 1))
        if mistake != "freed before it was used":
            fetched.record_stream(main)
        del fetched
    result, host = sum(outputs), torch.zeros(64)
    host.copy_(result, non_blocking=True)
    if mistake != "read before it was there":
        main.synchronize()
    return host.clone()


MISTAKES = {  # and the schedules that find them whatever the seed
    "copied before it was computed": {"late", "early"},
    "freed before it was copied": {"late", "early"},
    "changed before it was written": {"late", "early"},
    "filled while its last user was at work": {"early"},
    "reused before it was read": {"late", "early"},
    "unpinned before it was read": {"late", "early"},
    "used before it was there": {"late", "early"},
    "freed before it was used": {"late", "early"},
    "read before it was there": {"late", "early"},
}


def outcome(mistake: str, schedule: str, seed: int = 0) -> Tensor:
    with simulated.accelerator(schedule, seed) as device:
        return round_trip(device, mistake)


@functools.cache
def right() -> Tensor:
    return outcome("", "eager")


def is_right(result: Tensor) -> bool:
    return torch.equal(result, right())


@every_schedule
def test_the_right_program_is_right(schedule: str, seed: int) -> None:
    assert is_right(outcome("", schedule, seed))


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_gives_wrong_bits(mistake: str) -> None:
    assert {schedule for schedule in ("late", "early") if not is_right(outcome(mistake, schedule))} == MISTAKES[mistake]
    wrong = sum(not is_right(outcome(mistake, *case)) for case in RANDOM)
    assert wrong >= 4, f"only {wrong} of {len(RANDOM)} seeds show it"


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_seed_gives_the_same_bits_again(mistake: str) -> None:
    for seed in range(4):
        first, second = (outcome(mistake, "random", seed).view(torch.int32) for _ in range(2))
        assert torch.equal(first, second)


def test_recorded_memory_waits_for_the_other_stream_and_holds_up_nobody() -> None:
    with simulated.accelerator("late") as device:
        side, host = simulated.Stream(), simulated.pin(torch.zeros(3))
        x = torch.ones(3, device=device)
        side.wait_stream(simulated.current_stream())
        with simulated.stream(side):
            host.copy_(x, non_blocking=True)
        x.record_stream(side)
        del x
        simulated.current_stream().synchronize()
        assert host.tolist() == [0, 0, 0], "the default stream waits for nothing"
        side.synchronize()
        assert host.tolist() == [1, 1, 1]


# -- the device module ---------------------------------------------------------------------------------------------------


@every_schedule
def test_events(schedule: str, seed: int) -> None:
    with simulated.accelerator(schedule, seed) as device:
        x, host = torch.zeros(3, device=device), torch.zeros(3)
        for _ in range(50):
            x += 1
        host.copy_(x, non_blocking=True)
        event = simulated.current_stream().record_event()
        x.zero_()
        before = simulated.synchronisations
        while not event.query():
            pass
        assert simulated.synchronisations == before
        assert host.tolist() == [50, 50, 50]
        event.synchronize()
        assert simulated.synchronisations == before + 1
        assert simulated.Event().query(), "an event that was never recorded is over"
        simulated.synchronize()
        assert simulated.current_stream().query() or schedule == "random"


def test_values_wait_for_the_device() -> None:
    with simulated.accelerator() as device:
        x = torch.tensor([3.0, 1.0, 2.0], device=device)
        count = simulated.synchronisations
        assert x.sum().item() == 6 and x.tolist() == [3, 1, 2] and "3., 1., 2." in repr(x)
        assert simulated.synchronisations > count
        assert x[x > 1.5].tolist() == [3, 2], "a shape that depends on values"
        assert torch.equal(x, x.clone()) and x.sort().indices.tolist() == [1, 2, 0]
        assert x.new_zeros(2, 2).abs().sum().item() == 0
        with pytest.raises(RuntimeError, match="on the CPU"):
            x + torch.ones(3)
        with pytest.raises(RuntimeError):
            x @ torch.ones(2, 2, device=device)


@pytest.mark.parametrize("schedule", ["late", "eager"])
def test_exceptions_of_a_backward_pass(schedule: str) -> None:
    def fail(grad: Tensor) -> None:
        raise KeyError("hook")

    with simulated.accelerator(schedule) as device:
        for _ in range(2):
            x = torch.ones(3, device=device, requires_grad=True)
            y = x.sin()
            y.register_hook(fail)
            with pytest.raises(KeyError, match="hook") as caught:
                y.sum().backward()
            assert caught.traceback[-1].name == "fail"
        x.sin().sum().backward()
        assert torch.equal(x.grad.cpu(), torch.ones(3).cos())


def test_pinned_memory() -> None:
    with simulated.accelerator():
        x = torch.ones(3)
        y = x.pin_memory()
        assert y.is_pinned() and y[1:].is_pinned() and not x.is_pinned() and torch.equal(x, y)
        simulated.unpin(y)
        assert not y.is_pinned() and not torch.equal(x, y)


def test_unpinned_memory_is_read_at_once() -> None:
    with simulated.accelerator() as device:
        host, pinned = torch.ones(3), simulated.pin(torch.ones(3))
        x, y = host.to(device, non_blocking=True), pinned.to(device, non_blocking=True)
        host.zero_(), pinned.zero_()
        assert simulated.synchronisations == 0
        assert x.tolist() == [1, 1, 1] and y.tolist() == [0, 0, 0]


def test_views_share_memory_and_versions() -> None:
    with simulated.accelerator() as device:
        x = torch.zeros(4, 6, device=device)
        version = x._version
        view = x.view(2, 2, 6).transpose(0, 2)[1:3].unsqueeze(0)
        view += 1
        assert x._version == view._version == version + 1 and view._base is x
        assert view.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
        assert x.sum().item() == 8 and x.cpu()[:, 1:3].sum() == 8


def test_memory() -> None:
    with simulated.accelerator() as device:
        x = torch.empty(100, device=device)
        y = x[:50]
        assert simulated.memory_allocated() == 400
        z = torch.empty(100, dtype=torch.float64, device=device)
        del x, z
        assert simulated.memory_allocated() == 400 and simulated.max_memory_allocated() == 1200
        del y
        simulated.reset_peak_memory_stats()
        assert simulated.memory_allocated() == simulated.max_memory_allocated() == 0


def test_memory_that_is_freed_while_an_exception_is_pending() -> None:
    """The exception arrives, and the memory is known to be free."""

    def fail() -> None:
        raise KeyError("mine")

    class Fails(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            raise KeyError("mine")

    with simulated.accelerator() as device:
        x = torch.ones(3, device=device)
        for _ in range(3):
            with pytest.raises(KeyError, match="mine"):
                torch.stack([x * 2, fail()])
            y = x * 2
            with pytest.raises(KeyError, match="mine"), Fails():
                (y, y.sin())
            del y
            assert simulated.memory_allocated() == 12


def test_a_training_step_leaves_no_memory_behind() -> None:
    with simulated.accelerator("random") as device:
        model, inputs = language()
        model, inputs = model.to(device), inputs.to(device)
        found = []
        for _ in range(3):
            model(inputs).backward()
            found.append(simulated.memory_allocated())
        assert found[0] == found[1] == found[2] < simulated.max_memory_allocated()


def test_the_clock_knows_what_is_hidden() -> None:
    def seconds(overlap: bool) -> float:
        with simulated.accelerator(
            duration=lambda work: 1.0 if "sin" in work.name or "host" in work.kind else 0.0
        ) as device:
            main, x = simulated.current_stream(), torch.empty(100, device=device)
            side = simulated.Stream() if overlap else main
            for _ in range(10):
                x = x.sin()
                side.wait_stream(main)
                with simulated.stream(side):
                    torch.empty(100).copy_(x, non_blocking=True)
                x.record_stream(side)
            assert len([entry for entry in simulated.log() if entry.name == "aten::copy_ to_host"]) == 10
            return simulated.elapsed()

    assert seconds(overlap=False) == 20 and seconds(overlap=True) == 11


def test_the_clock_of_the_host_and_of_the_link() -> None:
    with simulated.accelerator() as device:
        x = torch.empty(10**6, device=device)
        sides = [simulated.Stream() for _ in range(2)]
        start = sides[0].record_event(simulated.Event(enable_timing=True))
        for side in sides:
            with simulated.stream(side):
                torch.empty(10**6).copy_(x, non_blocking=True)
        end = sides[1].record_event()
        assert start.elapsed_time(end) == pytest.approx(2 * 0.4), "the streams share one link"
        end.synchronize()
        assert simulated.elapsed() == pytest.approx(0.8e-3)
        a = torch.empty(100, 200, device=device) @ torch.empty(200, 300, device=device)
        assert a.shape == (100, 300) and simulated.log()[-1].start == pytest.approx(0.8e-3), "the host came back then"
        assert simulated.log()[-1].end == pytest.approx(0.8e-3 + 2 * 100 * 200 * 300 / 1e12)


def test_streams_of_threads_and_of_backward() -> None:
    seen = []

    class Look(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            seen.append(simulated.current_stream())
            return grad

    with simulated.accelerator() as device:
        side = simulated.Stream()
        with side:
            assert simulated.current_stream() == side
            Look.apply(torch.ones(3, device=device, requires_grad=True)).sum().backward()
        assert simulated.current_stream() == simulated.default_stream() != side
        assert seen == [side]


def test_nothing_is_left_behind() -> None:
    with simulated.accelerator() as device:
        assert torch.get_device_module(device) is simulated
        assert simulated.is_available() and simulated.is_initialized() and simulated.device_count() == 1
        assert simulated.current_device() == 0
        left = torch.ones(3, device=device)
        with simulated.device(0):
            simulated.synchronize()
    assert not simulated.is_available() and not torch.accelerator.is_available()
    with pytest.raises((RuntimeError, NotImplementedError)):
        left + 1
    del left
    gc.collect()
    with simulated.accelerator("eager") as device:
        assert simulated.memory_allocated() == 0 and torch.ones(3, device=device).sum().item() == 3

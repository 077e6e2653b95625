"""The host as a storage, on a device that is simulated: every race shows as wrong bits. `test_simulated` runs this file."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import simulated
import torch
from torch import Tensor, nn

import reactivate
from reactivate import policies
from reactivate.storage import Host, staging, streams

RANDOM = [("random", seed) for seed in range(6)]
every_schedule = pytest.mark.parametrize(("schedule", "seed"), [("late", 0), ("early", 0), *RANDOM], ids=str)

WIDTH, DEPTH, BATCH = 16, 5, 8


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x)


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Block(WIDTH) for _ in range(DEPTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x


def a_model() -> nn.Module:
    torch.manual_seed(0)
    return Stack()


def trained(model: nn.Module, device: Any, sizes: tuple[int, ...] = (BATCH,) * 3) -> list[Tensor]:
    """Train, and return all that came of it, on the CPU."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    numbers = torch.Generator().manual_seed(1)
    seen: list[Tensor] = []
    for size in sizes:
        optimizer.zero_grad()
        loss = model(torch.randn(size, WIDTH, generator=numbers).to(device)).square().mean()
        loss.backward()
        optimizer.step()
        seen.append(loss.detach())
        del loss
    return [value.cpu() for value in (*seen, *(parameter.detach() for parameter in model.parameters()))]


@pytest.fixture(scope="module")
def expected() -> list[Tensor]:
    return trained(a_model(), "cpu")


def on_device(schedule: str, seed: int, policy: Callable[[], Any], **options: Any) -> list[Tensor]:
    with simulated.accelerator(schedule, seed) as device:
        model = a_model().to(device)
        reactivate.apply(model, policy(), determinism="metadata")  # without checksums, whose ops are slow here
        return trained(model, device, **options)


def equal(some: list[Tensor], others: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(some, others, strict=True))


def inputs_to(host: Host) -> Any:
    return policies.full(inputs=host)


def results_to(host: Host) -> Any:
    return policies.first_match(policies.save_ops("linear", "gelu", storage=host), policies.full())


def both_to(host: Host) -> Any:
    return policies.first_match(policies.save_ops("linear", storage=host), policies.full(inputs=host))


@every_schedule
@pytest.mark.parametrize("policy", [inputs_to, results_to, both_to])
@pytest.mark.parametrize(("last", "ahead"), [(1, 1), (0, 0), (2, 3)])
def test_training_is_bitwise_that_on_the_cpu(
    schedule: str, seed: int, policy: Any, last: int, ahead: int, expected: list[Tensor]
) -> None:
    hosts: list[Host] = []

    def make() -> Any:
        hosts.append(Host(least_bytes=0, last=last, ahead=ahead))
        return policy(hosts[0])

    assert equal(on_device(schedule, seed, make), expected)
    traffic = hosts[0].traffic
    assert traffic.moved_bytes > 0 and traffic.loaded_bytes > 0, traffic


def test_nobody_waits_on_the_host() -> None:
    with simulated.accelerator("late") as device:
        model = a_model().to(device)
        reactivate.apply(model, inputs_to(Host(least_bytes=0)), determinism="metadata")
        x = torch.randn(BATCH, WIDTH).to(device)
        before = simulated.synchronisations
        for _ in range(3):
            model(x).sum().backward()
        assert simulated.synchronisations == before


# -- each rule, broken ---------------------------------------------------------------------------------------------------


def broken(monkeypatch: pytest.MonkeyPatch, rule: str) -> None:
    """Leave out what a rule of `streams.py` says."""
    copies = streams.CopyStreams

    def take_out(self: Any, run: Tensor, memory: Tensor, after: Any) -> Any:
        if rule != "1":
            self._out.wait_event(self.current().record_event())
        if after is not None and rule != "6":
            self._out.wait_event(after)
        with self._module.stream(self._out):
            memory.copy_(run, non_blocking=True)
        return self._out.record_event()

    def bring_back(self: Any, memory: Tensor, after: Any) -> Any:
        run = torch.empty(memory.shape, dtype=memory.dtype, device=self._device)
        if rule != "3":
            self._back.wait_event(self.current().record_event())
        if rule != "4":
            self._back.wait_event(after)
        with self._module.stream(self._back):
            run.copy_(memory, non_blocking=True)
        return run, self._back.record_event()

    monkeypatch.setattr(copies, "take_out", take_out)
    monkeypatch.setattr(copies, "bring_back", bring_back)
    if rule == "2":
        monkeypatch.setattr(staging.HostPiece, "let_go", lambda self: setattr(self, "_run", None))
    if rule == "5":
        monkeypatch.setattr(copies, "wait", lambda self, arrived, computing: None)


@pytest.mark.parametrize("rule", ["1", "2", "3", "4", "5", "6", "none"])
def test_each_rule_is_needed(rule: str, expected: list[Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    broken(monkeypatch, rule)
    runs = [("late", 0), ("early", 0), *(("random", seed) for seed in range(40))]
    found = []
    for schedule, seed in runs:
        found.append(
            equal(on_device(schedule, seed, lambda: inputs_to(Host(least_bytes=0, last=0, ahead=1))), expected)
        )
    assert all(found) if rule == "none" else not all(found)

"""Training on the simulated accelerator with storages, and what comes of it, on the CPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import simulated
import torch
from residual import Residual
from torch import Tensor, nn

import reactivate
from reactivate import policies
from reactivate.storage import Disk, Host

WIDTH, DEPTH, BATCH = 16, 5, 8


def a_model() -> nn.Module:
    torch.manual_seed(0)
    return Residual(WIDTH, DEPTH)


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


def on_device(schedule: str, seed: int, policy: Callable[[], Any], **options: Any) -> list[Tensor]:
    with simulated.accelerator(schedule, seed) as device:
        model = a_model().to(device)
        reactivate.apply(model, policy(), check="metadata")  # without checksums, whose ops are slow here
        return trained(model, device, **options)


def equal(some: list[Tensor], others: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(some, others, strict=True))


def inputs_to(host: Any) -> Any:
    return policies.full(inputs=host)


def results_to(host: Any) -> Any:
    return policies.first_match(policies.save_ops("linear", "gelu", storage=host), policies.full())


def both_to(host: Any) -> Any:
    return policies.first_match(policies.save_ops("linear", storage=host), policies.full(inputs=host))


def two_trained(device: Any, wheres: list[Any], policy: Any, steps: int = 2) -> list[list[Tensor]]:
    """Train two models, layer by layer in turns, each on a stream of its own; return all that came of each, on the CPU."""
    lanes = [simulated.Stream(), simulated.Stream()]
    models, seen = [a_model(), a_model()], [[], []]
    numbers = [torch.Generator().manual_seed(1) for _ in models]

    def each(run: Callable[[int], Any]) -> list[Any]:
        found = []
        for index, lane in enumerate(lanes):
            with simulated.stream(lane):
                found.append(run(index))
        return found

    each(lambda i: reactivate.apply(models[i].to(device), policy(wheres[i]), check="metadata"))
    optimizers = [torch.optim.SGD(model.parameters(), 0.1, momentum=0.9) for model in models]
    for _ in range(steps):
        values = each(lambda i: models[i].first(torch.randn(BATCH, WIDTH, generator=numbers[i]).to(device)))
        for depth in range(DEPTH):
            values = each(lambda i, depth=depth, values=values: models[i].layers[depth](values[i]))
        losses = each(lambda i, values=values: values[i].square().mean())
        each(lambda i, losses=losses: seen[i].append(losses[i].detach()))
        each(lambda i, losses=losses: losses[i].backward())
        each(lambda i: (optimizers[i].step(), optimizers[i].zero_grad()))
    return each(
        lambda i: [value.cpu() for value in (*seen[i], *(weight.detach() for weight in models[i].parameters()))]
    )


def until_empty(disk: Disk) -> None:
    """Wait for threads of the storage that still hold a tensor."""
    end = time.monotonic() + 30
    while disk.used_bytes and time.monotonic() < end:
        time.sleep(0.001)
    assert disk.used_bytes == 0


def steps_with(host: Host, sizes: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """Yield for each step the bytes that came back, and those that are locked; compare gradients with the CPU's."""
    with simulated.accelerator("random", 2) as device:
        model, twin = a_model().to(device), a_model()
        reactivate.apply(model, inputs_to(host), check="metadata")
        for rows in sizes:
            before, batch = host.traffic.loaded_bytes, torch.randn(rows, WIDTH)
            for one, here in ((model, batch.to(device)), (twin, batch)):
                one.zero_grad()
                one(here).sum().backward()
            for one, other in zip(model.parameters(), twin.parameters()):
                assert torch.equal(one.grad.cpu(), other.grad)
            yield host.traffic.loaded_bytes - before, host.locked_bytes

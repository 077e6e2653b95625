"""The host as a storage, on a device that is simulated: every race shows as wrong bits. `test_simulated` runs this file."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import simulated
import torch
from residual import Residual
from simulated_training import (
    BATCH,
    DEPTH,
    WIDTH,
    a_model,
    both_to,
    equal,
    inputs_to,
    on_device,
    results_to,
    steps_with,
    trained,
    two_trained,
    until_empty,
)
from torch import Tensor

import reactivate
from reactivate import policies
from reactivate.storage import Device, Disk, Host, slabs, staging, streams

RANDOM = [("random", seed) for seed in range(6)]
every_schedule = pytest.mark.parametrize(("schedule", "seed"), [("late", 0), ("early", 0), *RANDOM], ids=str)


@pytest.fixture(scope="module")
def expected() -> list[Tensor]:
    return trained(a_model(), "cpu")


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


@every_schedule
@pytest.mark.parametrize("policy", [inputs_to, results_to, both_to])
@pytest.mark.parametrize(("last", "ahead"), [(1, 1), (0, 0)])
def test_training_with_a_disk(
    schedule: str, seed: int, policy: Any, last: int, ahead: int, expected: list[Tensor], tmp_path: Path
) -> None:
    disk = Disk(tmp_path, least_bytes=0, last=last, ahead=ahead)
    assert equal(on_device(schedule, seed, lambda: policy(disk)), expected)
    assert disk.traffic.moved_bytes > 0 and disk.traffic.loaded_bytes > 0, disk.traffic
    until_empty(disk)


@every_schedule
@pytest.mark.parametrize("storage", ["host", "disk"])
def test_two_trainings_on_streams_of_their_own_share_a_storage(
    schedule: str, seed: int, storage: str, tmp_path: Path
) -> None:
    expected = trained(a_model(), "cpu", (BATCH,) * 2)
    disk = Disk(tmp_path, least_bytes=0)
    wheres: list[Any] = [Host(least_bytes=0), Host(least_bytes=0)] if storage == "host" else [disk, disk]
    with simulated.accelerator(schedule, seed) as device:
        found = two_trained(device, wheres, inputs_to)
    assert all(equal(one, expected) for one in found)
    assert wheres[0].traffic.loaded_bytes > 0
    if storage == "disk":
        until_empty(disk)


@every_schedule
def test_what_is_asked_for_on_another_stream_comes_in_the_order_of_its_own(
    schedule: str, seed: int, expected: list[Tensor]
) -> None:
    """`prefetch` where nothing has waited for the training's stream, which then gives the memory to others."""
    host = Host(least_bytes=0, last=0, ahead=3)
    with simulated.accelerator(schedule, seed) as device:
        model, twin = a_model().to(device), a_model()
        reactivate.apply(model, inputs_to(host), check="metadata")
        batch, lane = torch.randn(BATCH, WIDTH), simulated.Stream()
        lane.wait_stream(simulated.current_stream())
        for _ in range(3):
            with simulated.stream(lane):
                loss = model(batch.to(device)).sum()
            host.prefetch(None)
            others = [torch.full((BATCH, WIDTH), 3.0, device=device) for _ in range(4)]
            with simulated.stream(lane):
                loss.backward()
            others += [torch.full((BATCH, WIDTH), 4.0, device=device) for _ in range(4)]
            twin(batch).sum().backward()
        with simulated.stream(lane):
            found = [weight.grad.cpu() for weight in model.parameters()]
    assert equal(found, [weight.grad for weight in twin.parameters()])


@every_schedule
def test_memory_that_another_stream_reads_is_not_given_away(schedule: str, seed: int) -> None:
    host, values = Host(least_bytes=0, last=0, ahead=0), torch.arange(64.0)
    with simulated.accelerator(schedule, seed) as device:
        handle, rest = host.save(values.to(device) * 2), host.save(values.to(device))
        rest = [rest, host.save(values.to(device))]
        side = simulated.Stream()
        with simulated.stream(side):
            found = host.load(handle) * 3
        others = [torch.full((64,), 5.0, device=device) for _ in range(3)]
        simulated.default_stream().synchronize()
        with simulated.stream(side):
            assert torch.equal(found.cpu(), values * 6)
        del rest, others


@every_schedule
def test_regions_on_two_streams_that_read_one_tensor(schedule: str, seed: int) -> None:
    """Each stream has a copy of its own: what one has brought back, the other has not waited for."""
    host = Host(least_bytes=0, last=0)
    values = torch.linspace(-2, 2, BATCH * WIDTH)
    expected = []
    for curve in (torch.sin, torch.exp):
        x = (values * 2).requires_grad_()
        curve(x).tanh().sum().backward()
        expected.append(x.grad)
    with simulated.accelerator(schedule, seed) as device:
        x = values.to(device).requires_grad_()
        h = x * 2
        lanes, losses, found = [simulated.Stream(), simulated.Stream()], [], []
        for lane, curve in zip(lanes, (torch.sin, torch.exp)):
            lane.wait_stream(simulated.current_stream())
            with simulated.stream(lane):
                region = reactivate.checkpoint(lambda x, curve=curve: curve(x).tanh(), inputs=host)
                losses.append([region(h).sum() for _ in range(2)] + [region(h * 3).sum()])
        for lane, (loss, *_) in zip(lanes, losses):
            with simulated.stream(lane):
                found.append(torch.autograd.grad(loss, h)[0])
        simulated.synchronize()
        found = [gradient.cpu() for gradient in found]
    assert equal(found, expected)
    assert host.traffic.moved == 6 and host.traffic.moved_bytes == 4 * values.nbytes


@pytest.mark.parametrize("storage", ["host", "disk"])
@pytest.mark.parametrize("count", [1, 3])
def test_a_disk_and_a_host_hold_no_inputs_on_the_device(storage: str, count: int, tmp_path: Path) -> None:
    where: Any = Host(least_bytes=0) if storage == "host" else Disk(tmp_path, least_bytes=0)
    with simulated.accelerator("late") as device:
        model = a_model().to(device)
        reactivate.apply(model, inputs_to(where), check="metadata")
        batches = [torch.randn(BATCH, WIDTH).to(device) for _ in range(count)]
        before, losses = simulated.memory_allocated(), []
        for number, batch in enumerate(batches):
            with where.group(number):
                losses.append(model(batch).sum())
            if storage == "disk":
                for future in [piece._write.done for piece in pieces(where) if piece._write is not None]:
                    future.result()
            where.prefetch("nothing")  # what is written is let go of when the storage is used next
        held = (simulated.memory_allocated() - before) // (BATCH * WIDTH * 4)
        assert held <= count * 3, "the last one of a group waits, one may be on its way"
        for number, loss in enumerate(losses):
            where.prefetch(number)
            loss.backward()


def pieces(disk: Disk) -> list[Any]:
    return list(disk._mover._pieces.values())


def test_nobody_waits_on_the_host() -> None:
    with simulated.accelerator("late") as device:
        model = a_model().to(device)
        reactivate.apply(model, inputs_to(Host(least_bytes=0)), check="metadata")
        x = torch.randn(BATCH, WIDTH).to(device)
        before = simulated.synchronisations
        for _ in range(3):
            model(x).sum().backward()
        assert simulated.synchronisations == before


# -- each rule, broken ---------------------------------------------------------------------------------------------------


def broken(monkeypatch: pytest.MonkeyPatch, rule: str) -> None:
    """Leave out what a rule of `streams.py` says."""
    copies = streams.CopyStreams

    def take_out(self: Any, run: Tensor, memory: Tensor, after: Any, computing: Any) -> Any:
        if rule != "1":
            self._out.wait_event(computing.record_event())
        if after is not None and rule != "5":
            self._out.wait_event(after)
        with self._module.stream(self._out):
            memory.copy_(run, non_blocking=True)
        return self._out.record_event()

    def bring_back(self: Any, memory: Tensor, computing: Any) -> Any:
        with self._module.stream(computing):
            run = torch.empty(memory.shape, dtype=memory.dtype, device=self._device)
        if rule != "3":
            self._back.wait_event(computing.record_event())
        with self._module.stream(self._back):
            run.copy_(memory, non_blocking=True)
        return run, self._back.record_event()

    monkeypatch.setattr(copies, "take_out", take_out)
    monkeypatch.setattr(copies, "bring_back", bring_back)
    if rule == "2":
        monkeypatch.setattr(staging.HostPiece, "let_go", lambda self: setattr(self, "_run", None))
    if rule == "4":
        monkeypatch.setattr(copies, "wait", lambda self, run, arrived, computing: None)


SCHEDULES = [("early", 0), ("late", 0), *RANDOM]


@pytest.mark.parametrize("rule", ["1", "2", "3", "4"])
def test_training_is_wrong_without_a_rule(rule: str, expected: list[Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    broken(monkeypatch, rule)
    runs = (on_device(*schedule, lambda: inputs_to(Host(least_bytes=0, last=0))) for schedule in SCHEDULES)
    assert any(not equal(run, expected) for run in runs)


def other_stream_reads() -> bool:
    """Take in on one stream and read on another one, which has waited for nothing; return whether the bits come back."""
    with simulated.accelerator("late") as device:
        host = Host(least_bytes=0, last=0, ahead=0)
        values = torch.arange(64.0)
        others: list[Any] = [values.to(device), values.to(device)]
        handle = host.save(others[0] * 2)
        others = list(map(host.save, others))  # so the first is let go on the device
        with simulated.stream(simulated.Stream()):
            found = host.load(handle).cpu()
        del others
        return torch.equal(found, values * 2)


def slab_is_taken_again() -> bool:
    """Read, and let another stream fill the slab again before the device has come to the read."""
    with simulated.accelerator("late") as device:
        host = Host(least_bytes=0, last=0, ahead=0)
        values = torch.arange(64.0)
        one, other = values.to(device) * 2, values.to(device) * 3
        handle, rest = host.save(one), [host.save(values.to(device) + number) for number in range(2)]
        del one
        simulated.synchronize()
        found = host.load(handle)
        locked = host.locked_bytes
        del handle
        with simulated.stream(simulated.Stream()):
            again = host.save(other)
            assert host.locked_bytes == locked, "it is the same slab"
            rest.append(host.save(values.to(device)))
            assert torch.equal(host.load(again).cpu(), values * 3)
        return torch.equal(found.cpu(), values * 2)


@pytest.mark.parametrize(("rule", "is_right"), [("4", other_stream_reads), ("5", slab_is_taken_again)])
def test_streams_that_have_waited_for_nothing(rule: str, is_right: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_right()
    broken(monkeypatch, rule)
    assert not is_right()


def test_memory_is_unlocked_when_the_last_copy_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rule 6: unlocked memory is overwritten at once."""

    def is_right() -> bool:
        with simulated.accelerator("late") as device:
            host = Host(least_bytes=0, last=0, ahead=0)
            values = torch.arange(64.0)
            handle, rest = host.save(values.to(device) * 2), host.save(values.to(device))
            rest = [rest, host.save(values.to(device))]
            found = host.load(handle)
            del handle, rest
            host.clear()
            assert host.locked_bytes == 0
            return torch.equal(found.cpu(), values * 2)

    def release_at_once(slab: slabs.Slab) -> None:
        slab.last = None
        release(slab)

    assert is_right()
    release = slabs.Slab.release
    monkeypatch.setattr(slabs.Slab, "release", release_at_once)
    assert not is_right()


def test_memory_is_unlocked_when_its_storage_goes() -> None:
    """A GPU does not lock memory again that was unmapped while it was locked."""
    with simulated.accelerator("random") as device:
        for _ in range(3):
            host, values = Host(least_bytes=0, last=0, ahead=0), torch.arange(64.0).to(device)
            handles = [host.save(values * factor) for factor in range(3)]
            assert torch.equal(host.load(handles[2]), values * 2)
            assert simulated.count_pinned() == len(handles)
            del host, handles
            gc.collect()
            assert simulated.count_pinned() == 0


# -- what is kept where --------------------------------------------------------------------------------------------------


def test_the_device_holds_one_input_more_than_the_region_that_runs() -> None:
    """Not those of all regions: that is what the storage is for."""
    with simulated.accelerator("random", 1) as device:
        sizes = []
        for policy in (policies.full(), policies.full(inputs=Host(least_bytes=0, last=1))):
            model = a_model().to(device)
            reactivate.apply(model, policy, check="metadata")
            x = torch.randn(BATCH, WIDTH).to(device)
            before = simulated.memory_allocated()
            loss = model(x).sum()
            sizes.append((simulated.memory_allocated() - before) // (BATCH * WIDTH * 4))
            loss.backward()
            del loss, model, x
            gc.collect()
    assert sizes[0] >= DEPTH
    assert sizes[1] <= sizes[0] - (DEPTH - 2), sizes


@pytest.mark.parametrize("sizes", [(BATCH,) * 60, tuple(range(1, 31)) * 2])
def test_many_steps_lock_no_more(sizes: tuple[int, ...]) -> None:
    host = Host(least_bytes=0)
    with simulated.accelerator("late") as device:
        model = a_model().to(device)
        reactivate.apply(model, inputs_to(host), check="metadata")
        locked, held = [], []
        for size in sizes:
            model(torch.randn(size, WIDTH).to(device)).sum().backward()
            model.zero_grad()
            locked.append(host.locked_bytes)
            held.append(simulated.memory_allocated())
        half = len(sizes) // 2
        assert max(locked[half:]) <= max(locked[:half])
        assert max(held[half:]) <= max(held[:half])
        largest = (DEPTH + 1) * max(sizes) * WIDTH * 4
        assert max(locked) <= 2 * max(largest, (DEPTH + 1) * 4096)
        host.clear()
        assert host.locked_bytes == 0


@pytest.mark.slow
@pytest.mark.parametrize("storage", ["device", "host", "disk"])
def test_500_steps_hold_as_much_as_the_first(storage: str, tmp_path: Path) -> None:
    """Bytes on the device, of locked memory, and of the file, with shapes that change every step."""
    sizes = (3, 7, 1, 30, 12)
    make: dict[str, Any] = {"device": Device, "host": lambda: Host(least_bytes=0), "disk": lambda: on(tmp_path)}
    where = make[storage]()
    with simulated.accelerator("late") as device:
        model = Residual(WIDTH, 2).to(device)
        reactivate.apply(model, both_to(where), check="metadata")
        held = []
        for step in range(500):
            model(torch.randn(sizes[step % len(sizes)], WIDTH).to(device)).sum().backward()
            model.zero_grad()
            if storage == "disk":
                until_empty(where)
            here = simulated.memory_allocated(), getattr(where, "locked_bytes", 0), getattr(where, "file_bytes", 0)
            held.append(here)
    assert all(max(later) <= max(earlier) for earlier, later in zip(zip(*held[:50]), zip(*held[50:])))
    assert storage == "device" or max(held[-1][1:]) > 0


def on(path: Path) -> Disk:
    return Disk(path, least_bytes=0)


def test_a_limit_that_only_some_steps_reach() -> None:
    """Over it tensors stay on the device; the next step that is small enough moves all of them again."""
    host = Host(least_bytes=0, limit=4 * 4096)
    with pytest.warns(UserWarning, match="the limit of 16,384 locked bytes is reached") as seen:
        loaded = [loaded for loaded, locked in steps_with(host, (4, 200, 4, 200, 4)) if locked <= 4 * 4096]
    assert len(seen) == 1
    # Of five inputs the last waits on the device, and the one before has its copy there too.
    small, large = 3 * 4 * WIDTH * 4, 200 * WIDTH * 4
    assert loaded == [small, large, small, large, small]


def test_over_the_limit_tensors_stay_and_a_warning_says_so(expected: list[Tensor]) -> None:
    host = Host(least_bytes=0, limit=2 * 4096)
    with pytest.warns(UserWarning, match="the limit of 8,192 locked bytes is reached") as seen:
        assert equal(on_device("late", 0, lambda: inputs_to(host)), expected)
    assert len(seen) == 1


def test_forwards_without_a_backward_leave_nothing() -> None:
    host = Host(least_bytes=0)
    with simulated.accelerator("late") as device:
        model = a_model().to(device)
        reactivate.apply(model, inputs_to(host), check="metadata")
        x = torch.randn(BATCH, WIDTH).to(device)
        before = simulated.memory_allocated()
        for _ in range(3):
            model(x)
        gc.collect()
        assert simulated.memory_allocated() == before
        locked = host.locked_bytes
        model(x).sum().backward()
        assert host.locked_bytes == locked


def test_groups_are_brought_back_in_the_order_of_a_pipeline() -> None:
    host = Host(least_bytes=0, last=1)
    with simulated.accelerator("random", 3) as device:
        model = a_model().to(device)
        twin = a_model()
        reactivate.apply(model, inputs_to(host), check="metadata")
        batches = [torch.randn(BATCH, WIDTH) for _ in range(3)]
        losses = []
        for number, batch in enumerate(batches):
            with host.group(number):
                losses.append(model(batch.to(device)).sum())
        for number in range(3):
            host.prefetch(number)
            losses[number].backward()
        for batch in batches:
            twin(batch).sum().backward()
        for one, other in zip(model.parameters(), twin.parameters()):
            assert torch.equal(one.grad.cpu(), other.grad)


def test_a_tensor_written_to_before_it_was_copied_is_refused() -> None:
    with simulated.accelerator("late") as device:
        host = Host(least_bytes=0, last=1)
        tensor = torch.ones(64).to(device) * 2
        handle = host.save(tensor)
        tensor.add_(1)
        rest = host.save(torch.ones(64).to(device) * 3)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            host.load(handle)
        del rest


def test_views_of_one_memory_are_copied_once() -> None:
    with simulated.accelerator("late") as device:
        host = Host(least_bytes=0, last=0)
        base = torch.arange(64.0).reshape(8, 8).to(device) * 1
        handles = [host.save(view) for view in (base, base.t(), base[2:], base[:, 3])]
        rest = [host.save(base.clone()) for _ in range(2)]
        assert host.traffic.moved_bytes == 64 * 4 * (1 + len(rest))
        found = [host.load(handle) for handle in handles]
        for view, tensor in zip((base, base.t(), base[2:], base[:, 3]), found):
            assert torch.equal(view.cpu(), tensor.cpu()) and view.stride() == tensor.stride()
        assert len({tensor.untyped_storage().data_ptr() for tensor in found}) == 1


def test_how_much_of_the_copies_is_hidden() -> None:
    """The virtual clock: with copies as long as half of the compute, a step is hardly longer than without them."""

    def duration(work: Any) -> float:
        return {"compute": 1e-6 * (1 + work.flops / 100)}.get(work.kind, 2e-5)

    def elapsed(policy: Any) -> float:
        with simulated.accelerator("eager", 0, duration) as device:
            model = a_model().to(device)
            reactivate.apply(model, policy, check="metadata")
            x = torch.randn(BATCH, WIDTH).to(device)
            start = simulated.elapsed()
            model(x).sum().backward()
            return simulated.elapsed() - start

    plain = elapsed(policies.full())
    assert elapsed(policies.full(inputs=Host(least_bytes=0))) < 1.1 * plain

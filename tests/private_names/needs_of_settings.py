"""Needs of settings, flags, autocast, generators, devices, streams and storages."""

from __future__ import annotations

import sys
from contextvars import ContextVar, copy_context
from types import ModuleType
from typing import Any

import torch
from needs import needs, room


@needs("is_setting")
def settings_of_torch_are_told_from_other_context_variables() -> None:
    before = torch._inductor.config.max_autotune
    torch._inductor.config.max_autotune = not before
    try:
        others = {variable for variable in copy_context() if not room.is_setting(variable)}
        assert others.isdisjoint(variable for variable in copy_context() if variable.name == "max_autotune")
        mine = ContextVar("max_autotune", default=None)
        mine.set([])
        assert not room.is_setting(mine) and not room.is_setting(mine)
    finally:
        torch._inductor.config.max_autotune = before


@needs("StreamOrders", "current_stream")
def streams_of_a_cpu_tell_their_orders() -> None:
    """Behaviour: `test_planner_collectives`."""
    told: list[Any] = []
    orders = room.StreamOrders(lambda *given: told.append(given), lambda *given: told.append(given))
    stream, other = torch.cpu.Stream(), room.current_stream()
    orders.begin()
    with torch.cpu.stream(stream):
        event = room.current_stream().record_event()
        event.record()
    other.wait_event(event)
    other.wait_stream(stream)
    assert told == [(stream, event), (stream, event), (other, event), (other, stream)]
    assert torch.accelerator.current_stream() is other
    orders.end()
    assert stream.record_event() is None and len(told) == 4


@needs("StorageResizes")
def a_storage_that_a_program_resizes_is_told() -> None:
    """Behaviour: `test_plan_offline`."""
    told: list[Any] = []
    storage = torch.ones(4).untyped_storage()
    resizes = room.StorageResizes(told.append)
    resizes.begin()
    storage.resize_(0)
    resizes.end()
    storage.resize_(16)
    assert told == [storage] and told[0] is storage and storage.nbytes() == 16
    assert "resize_" not in vars(torch.UntypedStorage)


@needs("RandomStatesTaken")
def a_random_state_that_a_program_takes_is_told() -> None:
    """Behaviour: `test_plan_models`."""
    told: list[Any] = []
    before, states = torch.get_rng_state, room.RandomStatesTaken(told.append)
    states.begin()
    taken = torch.get_rng_state()
    with torch.random.fork_rng(devices=()):
        pass
    states.end()
    assert len(told) == 2 and told[0] is taken and torch.get_rng_state is before


@needs("cpu_generator_memory", "GeneratorMemory")
def the_memory_of_the_cpus_generator_is_found() -> None:
    memory = room.cpu_generator_memory()
    assert isinstance(memory, room.GeneratorMemory)
    assert [size for _, size in (*memory.seen, memory.spare, memory.whole)] == [1, 1, 13, 68, 16, 2540]


@needs("accelerator_device")
def the_accelerator_is_what_torch_says() -> None:
    device, public = room.accelerator_device(), torch.accelerator.current_accelerator()
    assert (device and device.type) == (public and public.type)


@needs("ask")
def a_question_is_a_call() -> None:
    assert room.ask(lambda: 3) == 3


@needs("register_device_module", "xla_runtime")
def a_device_type_without_a_module_gets_one() -> None:
    assert "torch_xla" in sys.modules or room.xla_runtime() is None
    assert not hasattr(torch, "hpu")
    module = ModuleType("torch.hpu")
    room.register_device_module("hpu", module)
    assert torch.get_device_module("hpu") is module
    del torch.hpu, sys.modules["torch.hpu"]  # type: ignore[attr-defined]


@needs("Flag", "FLAGS")
def flags_can_be_read_and_written_back() -> None:
    values = [flag.read() for flag in room.FLAGS]
    for flag, value in zip(room.FLAGS, values, strict=True):
        flag.write(value)
    # Some releases call the default precision "none" until it is set, and "ieee" afterwards.
    after = ["none" if value == "none" else flag.read() for flag, value in zip(room.FLAGS, values, strict=True)]
    assert after == values
    assert len({flag.name for flag in room.FLAGS}) == len(values)


@needs("leave_autocast")
def autocast_contexts_are_left() -> None:
    for _ in range(3):
        torch.autocast("cpu").__enter__()
    room.leave_autocast(1)
    assert torch.autocast_decrement_nesting() == 0
    torch.set_autocast_enabled("cpu", False)


@needs("is_any_autocast_enabled")
def autocast_is_noticed() -> None:
    assert not room.is_any_autocast_enabled()
    with torch.autocast("cpu"):
        assert room.is_any_autocast_enabled()


@needs("FlagsGuard", "GUARDED", "NoGuard")
def a_guard_compares_many_flags() -> None:
    """Each flag: `test_each_flag_is_seen_when_it_changes`."""
    assert room.NoGuard().check() is True
    assert {"default dtype", "deterministic", "threads", room.is_any_autocast_enabled} <= room.GUARDED
    guard = room.FlagsGuard()
    assert guard.check() is True
    with torch.autocast("cpu"):
        assert guard.check() is False
    assert guard.check() is True

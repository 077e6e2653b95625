"""Needs of function modes, dispatch modes, transforms and fake tensors: what is active, what it sees, what is put aside."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from needs import needs, room
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, is_in_torch_dispatch_mode

from reactivate.errors import UnsupportedError


class FunctionMode(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class DispatchMode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@needs("is_function_mode_active", "function_modes", "replace_function_modes", "without_function_modes")
def function_modes_are_read_and_replaced() -> None:
    with FunctionMode() as mode:
        assert room.is_function_mode_active()
        assert room.function_modes() == (mode,)
        with room.without_function_modes():
            assert not room.is_function_mode_active()
        room.replace_function_modes(())
        assert not room.is_function_mode_active()
        room.replace_function_modes((mode,))
    assert room.function_modes() == ()


@needs("asking", "is_torchs_function", "IN_C")
def the_function_that_asks_is_known() -> None:
    asked: list[Any] = []

    class Mode(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            asked.append(room.asking(func, kwargs))
            return func(*args, **(kwargs or {}))

    functional = nn.functional
    silu, x = functional.silu, torch.ones(2)
    with (
        mock.patch.object(functional, "silu", lambda x, **kwargs: silu(x)),
        mock.patch.object(Tensor, "sin", lambda x: x.cos()),
    ):
        with Mode():
            functional.silu(x), functional.max_pool1d(x[None], 1), functional.gelu(x), x.split(1), x**2, torch.sin(x)
        mine = functional.silu
    assert not {mine, Tensor.sin} & set(asked)
    assert {silu, functional.max_pool1d, functional.gelu, Tensor.split, Tensor.__pow__, torch.sin} <= set(asked)
    assert room.is_torchs_function(silu) and not room.is_torchs_function(mine)
    assert {type(torch.sin), type(Tensor.sin), type(Tensor.grad.__get__)} <= room.IN_C


@needs("show_inside")
def a_mode_is_shown_what_a_function_of_torchs_calls() -> None:
    seen: list[Any] = []

    class Mode(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            is_whole = func is nn.functional.multi_head_attention_forward
            return room.show_inside(self, func, args, kwargs or {}) if is_whole else func(*args, **(kwargs or {}))

    attention, x = nn.MultiheadAttention(4, 2), torch.ones(3, 1, 4)
    for around in (nullcontext, FunctionMode):
        seen.clear()
        with around() as mode, Mode():
            found, _ = attention(x, x, x, need_weights=False)
            assert room.function_modes()[-1] is not mode
        assert nn.functional.linear in seen and torch.equal(found, attention(x, x, x, need_weights=False)[0])


@needs("is_dispatch_mode_active", "dispatch_modes", "leave_dispatch_modes", "replace_dispatch_modes")
def dispatch_modes_are_read_and_replaced() -> None:
    with DispatchMode() as mode:
        assert room.is_dispatch_mode_active()
        assert room.dispatch_modes() == (mode,)
        room.replace_dispatch_modes(())
        assert not room.is_dispatch_mode_active()
        room.replace_dispatch_modes((mode,))
    assert room.dispatch_modes() == ()
    mode.__enter__()
    room.leave_dispatch_modes(0)
    assert room.dispatch_modes() == () and not is_in_torch_dispatch_mode()


@needs("lacks_values", "NEEDS_NUMBERS")
def errors_for_the_want_of_values_are_known() -> None:
    def error_of(run: Callable[[Tensor], Any]) -> BaseException:
        with room.FakeTensorMode():
            x = torch.empty(3)
        try:
            run(x)
        except Exception as error:
            return error
        raise AssertionError("nothing was raised")

    def of_ours(x: Tensor) -> None:
        x.no_such_name

    def of_users(x: Tensor) -> None:
        raise ValueError(f"a batch of {len(x)}")

    wants = (Tensor.item, Tensor.tolist, Tensor.nonzero, Tensor.numpy, "{:.2f}".format, lambda x: x[x > 0])
    assert all(room.lacks_values(error_of(run)) for run in wants)
    assert isinstance(error_of(Tensor.nonzero), room.NEEDS_NUMBERS)
    assert not any(room.lacks_values(error_of(run)) for run in (of_ours, of_users))
    assert not any(map(room.lacks_values, (torch.OutOfMemoryError("no more"), UnsupportedError("of ours"))))


@needs("current_transform", "name_of_transform")
def transforms_have_names() -> None:
    seen: list[Any] = []

    def look(x: Tensor) -> Tensor:
        seen.append(room.name_of_transform())
        return x.sum()

    assert room.current_transform() is None
    torch.func.grad(look)(torch.ones(2))
    torch.func.vmap(look)(torch.ones(2, 2))
    torch.func.jvp(look, (torch.ones(2),), (torch.ones(2),))
    assert seen == ["torch.func.grad or vjp", "torch.func.vmap", "torch.func.jvp"]


@needs("is_batched", "unbatched")
def batches_are_left_and_entered_again() -> None:
    seen: list[bool] = []

    def look(x: Tensor) -> Tensor:
        with room.unbatched():
            seen.extend([room.is_batched(), bool(torch.rand(2).numel())])
        seen.append(room.is_batched())
        return x.sum()

    torch.func.vmap(look)(torch.ones(2, 2))
    torch._vmap_internals._vmap(torch._vmap_internals._vmap(look))(torch.ones(2, 2, 2))
    assert seen == [False, True, True] * 2 and not room.is_batched()


@needs("push_function_mode", "pop_function_mode")
def a_function_mode_is_pushed_and_popped() -> None:
    class Noted(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func

    mode, x = Noted(), torch.ones(2)
    room.push_function_mode(mode)
    found = torch.sin(x)
    assert room.pop_function_mode() is mode
    assert found is torch.sin


@needs("run_beside_function_modes")
def a_look_is_seen_by_no_function_mode() -> None:
    with FunctionMode():
        seen = room.run_beside_function_modes(
            lambda one, other: (one, other, room.is_function_mode_active()), 1, other=2
        )
        assert seen == (1, 2, False)
        assert room.is_function_mode_active()


@needs("run_unseen")
def a_write_is_seen_by_nobody() -> None:
    seen: list[str] = []

    class Functions(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append("function")
            return func(*args, **(kwargs or {}))

    class Ops(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append("op")
            return func(*args, **(kwargs or {}))

    one, other = torch.zeros(2), torch.zeros(2)
    with Functions(), Ops():
        room.run_unseen(one.add_, 1)
        assert seen == []
        other.add_(one)
    assert set(seen) == {"function", "op"}
    assert other.tolist() == [1, 1]


@needs("FakeTensor", "FakeTensorMode")
def a_fake_tensor_has_a_size_and_a_graph_and_no_memory() -> None:
    mode = room.FakeTensorMode(allow_non_fake_inputs=True)
    fake = mode.from_tensor(nn.Parameter(torch.ones(3, 2**40 // 4, device="meta")))
    assert isinstance(fake, room.FakeTensor) and isinstance(fake, nn.Parameter) and fake.fake_mode is mode
    assert fake.untyped_storage().nbytes() == 3 * 2**40
    weight = nn.Parameter(torch.ones(3))
    with mode:
        gradient = torch.autograd.grad((mode.from_tensor(torch.ones(3)) * weight).sum(), weight)[0]
        assert type(torch.default_generator.get_state()) is Tensor  # a state that can be set again
    assert type(gradient) is room.FakeTensor


@needs("device_of")
def a_fake_tensor_says_where_it_seems_to_be() -> None:
    with room.FakeTensorMode():
        assert room.device_of(torch.ones(2, device="cuda:1")) == torch.device("cuda:1")
        assert room.device_of(torch.ones(2)) == torch.device("cpu")


@needs("without_dispatch")
def tensors_are_made_beside_fake_ones() -> None:
    with room.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = torch.ones(2, 3)
        with room.without_dispatch(), room.without_function_modes():
            made = torch.empty_strided((3, 2), (1, 3), device="meta")
            made.set_(fake.untyped_storage(), 0, (3, 2), (1, 3))
            assert type(made) is Tensor and fake.device == torch.device("cpu") and fake.shape == (2, 3)
        view = room.FakeTensor(mode, made, fake.fake_device)
    assert view.untyped_storage() is fake.untyped_storage() and view.device == fake.device


@needs("unset_fake_temporarily", "DEVICE_QUERY", "unlogged")
def a_fake_mode_can_be_put_aside() -> None:
    with room.FakeTensorMode(allow_non_fake_inputs=True):
        fake = torch.ones(2)
        with room.unlogged(), pytest.raises(RuntimeError):
            fake.sum().item()
        with room.unset_fake_temporarily():
            assert type(torch.ones(2)) is Tensor
    assert room.DEVICE_QUERY(torch.ones(2)) == torch.device("cpu")


@needs("is_same_state")
def states_of_generators_are_compared_unseen() -> None:
    seen: list[Any] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    state = torch.Generator().get_state()
    other = state.clone()
    other[0] += 1
    with Watch():
        assert room.is_same_state(state, state.clone()) is True
        assert room.is_same_state(state, other) is False
    assert torch.ops.aten.equal.default not in seen
    with room.FakeTensorMode():
        assert room.is_same_state(state, state)
    assert room.is_same_state((1, [2]), (1, [2])) is True
    assert room.is_same_state(1, 2) is False

"""Needs of graphs and their backward: nodes, custom functions, views, results that are handed back, and versions."""

from __future__ import annotations

import sys
from typing import Any, ClassVar

import pytest
import torch
from needs import needs, room
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode


@needs("set_grad_enabled")
def grad_mode_is_set() -> None:
    room.set_grad_enabled(False)
    assert not torch.is_grad_enabled()
    room.set_grad_enabled(True)
    assert torch.is_grad_enabled()


@needs("current_backward", "on_backward_end")
def a_backward_has_a_number_and_an_end() -> None:
    seen: list[Any] = []
    x = torch.ones(2, requires_grad=True)
    y = x * 2

    def hook(grad: Tensor) -> None:
        seen.append(room.current_backward())
        room.on_backward_end(lambda: seen.append("end"))

    y.register_hook(hook)
    y.sum().backward()
    assert room.current_backward() == -1
    assert seen[0] >= 0
    assert seen[1] == "end"


@needs("FUNCTION_APPLY_CODE", "current_node", "is_function_running", "is_outside_of_functions")
def a_custom_function_is_known_while_it_runs() -> None:
    outside: list[bool] = []
    numbers: list[int] = []
    kinds: list[bool] = []
    codes: list[Any] = []

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            with torch.enable_grad():
                outside.append(room.is_outside_of_functions())
            ctx.save_for_backward(x)
            numbers.append(room.next_node_number())
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return ctx.saved_tensors[0] * grad

    def pack(tensor: Tensor) -> Tensor:
        codes.append(sys._getframe(1).f_code)
        outside.append(room.is_outside_of_functions())
        numbers.append(room.next_node_number())
        return tensor

    def unpack(tensor: Tensor) -> Tensor:
        kinds.append(room.is_function_running())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        y = Double.apply(torch.ones(2, requires_grad=True)).exp()
    assert codes == [room.FUNCTION_APPLY_CODE or sys._getframe().f_code, sys._getframe().f_code]
    assert outside == [False, True, True]  # in its forward, as it saves, and in another op
    assert numbers[0] == numbers[1] < numbers[2]  # its node is there before its forward; that of an op before it saves
    y.sum().backward()
    assert kinds == [False, True]
    assert room.current_node() is None


@needs("is_left_for_another_backward", "is_taken")
def a_backward_takes_the_edges_to_what_is_asked_for() -> None:
    seen: list[bool] = []

    def read(tensor: Tensor) -> Tensor:
        seen.append(room.is_left_for_another_backward())
        return tensor

    x, weight = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, read):
        y = torch.where(x > 0, x.exp(), weight)  # saves one tensor for both, and `exp` one that has one edge
    for inputs in ([x], [weight], [x, weight]):
        torch.autograd.grad(y.sum(), inputs, retain_graph=True)
    y.sum().backward()
    assert seen == [True, False, True, False, False, False, False]
    assert not room.is_left_for_another_backward()


@needs("is_profiling")
def a_profiler_is_noticed() -> None:
    assert not room.is_profiling()
    with torch.profiler.profile():
        assert room.is_profiling()


@needs("is_profiler_running")
def a_profiler_is_told_from_none() -> None:
    assert room.is_profiler_running() is False
    with torch.profiler.profile():
        assert room.is_profiler_running() is True


@needs("has_graph")
def a_view_that_lost_its_graph_has_had_one() -> None:
    base = torch.ones(2, requires_grad=True) * 1
    one, other = base.unbind()
    assert room.has_graph(one)
    other.detach().mul_(2)
    assert room.has_graph(one) and not room.has_graph(torch.ones(1))


@needs("copy_unseen", "copy_all", "set_versions")
def running_statistics_are_copied_and_written_without_a_trace() -> None:
    module = nn.BatchNorm1d(3)
    assert module.running_mean is not None
    version, copy = module.running_mean._version, room.copy_unseen(module.running_mean)
    module(torch.randn(4, 3))
    assert module.running_mean._version == version, "batch norm writes without a new version: else no copy was needed"
    room.copy_all([module.running_mean], [copy])
    room.set_versions([module.running_mean], [version])
    assert module.running_mean._version == version
    assert torch.equal(module.running_mean, copy)


@needs("negated_view")
def a_view_has_the_other_negation_bit() -> None:
    base = torch.ones(2)
    negated = room.negated_view(base)
    base.mul_(2)
    assert negated.tolist() == [-2, -2] and negated.is_neg() and not room.negated_view(negated).is_neg()


@needs("view_again", "base_of")
def a_view_is_made_of_another_base() -> None:
    base = torch.arange(8.0)
    fresh = base.clone()
    part = room.view_again(base.view(2, 4)[1], fresh)
    part.mul_(10)
    assert fresh.tolist() == [0, 1, 2, 3, 40, 50, 60, 70]
    assert part._base is fresh is room.base_of(part) is room.base_of(fresh)


@needs("is_forward_mode_active")
def forward_mode_is_noticed() -> None:
    assert not room.is_forward_mode_active()
    with torch.autograd.forward_ad.dual_level():
        assert room.is_forward_mode_active()


@needs("next_node_number", "current_node_number")
def nodes_are_numbered_in_the_order_of_the_forward() -> None:
    class Asks(TorchDispatchMode):
        seen: ClassVar[list[int | None]] = []

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.seen.append(room.current_node_number())
            return func(*args, **(kwargs or {}))

    x = torch.ones(2, requires_grad=True)
    first = room.next_node_number()
    y = x.exp()
    second = room.next_node_number()
    assert room.current_node_number() is None and first < second
    loss = y.sin().sum()
    with Asks():
        loss.backward()
    numbers = [number for number in Asks.seen if number is not None and number >= 0]
    assert numbers == sorted(numbers, reverse=True) and first <= numbers[-1] < second
    assert -1 in Asks.seen  # the accumulation of a gradient


@needs("as_a_result")
def a_result_is_handed_back_as_that_of_an_op() -> None:
    x = torch.ones(2)
    given = room.as_a_result(x.detach())
    assert given.requires_grad and not given.is_leaf and not given._is_view()
    assert given.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    with pytest.raises(RuntimeError, match="its recomputation skips"):
        given.sum().backward()


@needs("give_hooks")
def hooks_that_are_given_to_a_tensor_are_called() -> None:
    for tensor in (torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True) * 1):
        room.give_hooks(tensor, {0: lambda gradient: gradient * 3})
        (gradient,) = torch.autograd.grad((tensor * 2).sum(), tensor)
        assert torch.equal(gradient, torch.full((2,), 6.0))
        assert list(tensor._backward_hooks or ()) == [0]


@needs("hook_backward")
def a_backward_that_goes_through_a_result_calls_what_is_in_a_dict_by_then() -> None:
    seen: list[Any] = []
    hooks = {0: seen.append}
    first, second = torch.ones(2, 3, requires_grad=True).unbind()
    alias = first.detach()
    room.hook_backward(first, alias, hooks)
    assert alias._backward_hooks is None and first._backward_hooks is None
    second.sum().backward(retain_graph=True)
    assert len(seen) == 1, "also if it comes from another result of the same op"
    hooks.clear()
    first.sum().backward()
    assert len(seen) == 1


@needs("has_setup_context")
def two_kinds_of_custom_functions_are_told_apart() -> None:
    class Old(torch.autograd.Function):
        """Its forward gets the context."""

    class New(torch.autograd.Function):
        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            """Fills the context."""

    assert not room.has_setup_context(Old)
    assert room.has_setup_context(New)


@needs("counting_versions")
def aliases_share_the_counter_in_a_dispatch_mode() -> None:
    found: list[Tensor] = []

    class Alias(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            with room.counting_versions():
                found.append(result.detach())
            return result

    with Alias():
        result = torch.ones(2, requires_grad=True).sin()
    with torch.no_grad():
        result.zero_()
    assert found[-1]._version == result._version == 1 and not found[-1]._is_view()

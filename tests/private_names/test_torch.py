"""Every private name of torch that the package leans on, and what it needs of each.

When a new torch breaks one of these, this file says which, and what it was for.
"""

from __future__ import annotations

import ast
import importlib
import pkgutil
import random
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from contextvars import ContextVar, copy_context
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from several import check_each
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, is_in_torch_dispatch_mode

import reactivate
from reactivate import _torch
from reactivate._snapshot.random_streams import STREAMS
from reactivate._torch import private_api
from reactivate._torch.private_api import find, is_missing, layout, resolve_private, ways
from reactivate.errors import UnsupportedError

PACKAGE = Path(reactivate.__file__).parent
CHECKS: dict[str, Callable[[], None]] = {}
FILES = [importlib.import_module(f"reactivate._torch.{item.name}") for item in pkgutil.iter_modules(_torch.__path__)]
PARTS = [item for item in FILES if item is not private_api]
room: Any = SimpleNamespace(**{name: value for part in PARTS for name, value in vars(part).items()})


def needs(*names: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """The attributes asked for below are all that the package asks of `names`."""

    def register(check: Callable[[], None]) -> Callable[[], None]:
        CHECKS.update(dict.fromkeys(names, check))
        return check

    return register


@needs("push_saved_tensor_hooks", "pop_saved_tensor_hooks")
def hooks_see_what_is_saved_and_what_is_read() -> None:
    seen: list[str] = []
    room.push_saved_tensor_hooks(lambda tensor: seen.append("saved") or tensor, lambda it: seen.append("read") or it)
    x = torch.ones(2, requires_grad=True)
    y = x.sin()
    room.pop_saved_tensor_hooks()
    y.cos().sum().backward()
    assert seen == ["saved", "read"]


@needs("innermost_pack_hook")
def the_innermost_pack_hook_is_the_one_that_was_pushed() -> None:
    assert room.innermost_pack_hook() is None
    pack = lambda tensor: tensor  # noqa: E731
    room.push_saved_tensor_hooks(pack, lambda tensor: tensor)
    assert room.innermost_pack_hook() is pack
    room.pop_saved_tensor_hooks()


@needs("pop_hooks_of")
def hooks_are_popped_by_their_owner() -> None:
    """Behaviour: `test_interrupts`."""

    class Owner:
        def pack(self, tensor: Tensor) -> Tensor:
            return tensor

    owner = Owner()
    room.push_saved_tensor_hooks(owner.pack, owner.pack)
    room.pop_hooks_of(Owner())
    assert room.innermost_pack_hook() == owner.pack
    for _ in range(2):
        room.pop_hooks_of(owner)
        assert room.innermost_pack_hook() is None


@needs("asks_for_users_hooks", "not_a_users_hook", "beside_users_hooks", "forget_users_hooks")
def a_hook_says_which_hooks_are_the_users() -> None:
    """Behaviour: `test_dropin_torch.test_hooks_around_selective_checkpointing`."""
    users, unpack = (lambda tensor: tensor), (lambda tensor: tensor)
    found: list[Any] = []

    @room.not_a_users_hook
    def pack(tensor: Tensor) -> Tensor:
        return tensor

    def look() -> None:
        hook = room.innermost_pack_hook()
        found.append(hook._user_hooks if hook._checkpoint_internal else "the user's")

    assert room.beside_users_hooks(pack) is pack
    if not room.asks_for_users_hooks:  # torch < 2.14
        return
    with torch.autograd.graph.saved_tensors_hooks(users, unpack):
        for _ in range(2):
            room.push_saved_tensor_hooks(room.beside_users_hooks(pack), unpack)
            look()
        room.forget_users_hooks()
        look()
        room.pop_saved_tensor_hooks()
        room.pop_saved_tensor_hooks()
    assert found == [(users, unpack), (users, unpack), None]


@needs("users_hooks")
def the_users_hooks_around_are_found_through_marked_ones() -> None:
    """Behaviour: `test_state_users_hooks`."""

    class Owner:
        users_hooks: Any = None

        @room.not_a_users_hook
        def pack(self, tensor: Tensor) -> Tensor:
            return tensor

    users, unpack, owner = (lambda tensor: tensor), (lambda tensor: tensor), Owner()
    assert room.users_hooks() is None
    with torch.autograd.graph.saved_tensors_hooks(users, unpack):
        assert room.users_hooks() == (users, unpack)
        owner.users_hooks = room.users_hooks()
        room.push_saved_tensor_hooks(owner.pack, unpack)
        assert room.users_hooks() == (users, unpack)
        room.pop_saved_tensor_hooks()
        room.push_saved_tensor_hooks(Owner().pack, unpack)
        assert room.users_hooks() is None
        room.pop_saved_tensor_hooks()


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


@needs("set_grad_enabled")
def grad_mode_is_set() -> None:
    room.set_grad_enabled(False)
    assert not torch.is_grad_enabled()
    room.set_grad_enabled(True)
    assert torch.is_grad_enabled()


@needs("version_of_dict")
def a_dict_has_a_version_until_somebody_writes_to_it() -> None:
    """Behaviour: `test_state_trees`. Only where there are versions can one be met again."""
    items: dict[str, int] = {"item": 0}
    before = room.version_of_dict(items)
    if sys.version_info < (3, 12):
        assert room.version_of_dict(items) == before
    items["item"] = 1
    assert room.version_of_dict(items) != before
    assert room.version_of_dict({"item": 1}) != room.version_of_dict(items)


@needs("dict_of_class")
def the_attributes_of_a_class_are_in_a_dict() -> None:
    """Behaviour: `test_holders`."""

    class Other(type):
        __dict__ = {"item": 1}

    kind = type("Kind", (), {"item": 0})
    items = room.dict_of_class(kind)
    assert items["item"] == 0
    kind.item = 1  # type: ignore[attr-defined]
    assert items["item"] == 1
    assert room.dict_of_class(Other("Kind", (), {})) is None


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


@needs("is_left_for_another_backward")
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


@needs("registered_containers", "leaves_with_paths")
def containers_of_libraries_are_flattened() -> None:
    node = room.registered_containers[dict]
    children, context = node.flatten_fn({"a": 1, "b": 2})
    assert node.unflatten_fn(children, context) == {"a": 1, "b": 2}
    assert room.leaves_with_paths([0, {"b": 1}]) == [("[0]", 0), ("[1]['b']", 1)]


@needs("is_profiling")
def a_profiler_is_noticed() -> None:
    assert not room.is_profiling()
    with torch.profiler.profile():
        assert room.is_profiling()


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


@needs("MODULE_CALL_CODE")
def forward_is_called_from_there() -> None:
    codes: list[Any] = []

    class Look(nn.Module):
        def forward(self) -> None:
            codes.extend([sys._getframe(1).f_code, sys._getframe(3).f_code])

    Look()()
    assert codes == [room.MODULE_CALL_CODE, sys._getframe().f_code]


@needs("GLOBAL_HOOKS", "GLOBAL_FORWARD_HOOKS", "GLOBAL_FLAGS")
def hooks_around_every_module_are_found() -> None:
    module = nn.Linear(1, 1)
    handle = nn.modules.module.register_module_forward_hook(lambda *args: None, with_kwargs=True)
    try:
        assert any(room.GLOBAL_HOOKS) and any(room.GLOBAL_FORWARD_HOOKS) and any(room.GLOBAL_FLAGS)
        assert room.has_hooks(module)
    finally:
        handle.remove()
        for flags in room.GLOBAL_FLAGS:  # which torch leaves there
            flags.clear()
    assert not any(room.GLOBAL_HOOKS)


@needs("module_call", "has_hooks")
def modules_are_called_through_their_hooks() -> None:
    module = nn.Linear(1, 1)
    assert type(module).__call__ is room.module_call
    assert not room.has_hooks(module)
    module.register_forward_hook(lambda *args: None)
    assert room.has_hooks(module)


@needs("are_distributed_alike")
def plain_tensors_are_distributed_alike() -> None:
    """Behaviour: `test_process_groups`."""
    assert room.are_distributed_alike(torch.ones(2), torch.ones(3))


@needs("is_flat_wrapper", "is_in_flat_parameter")
def what_a_flat_parameter_is_made_of_is_known() -> None:
    """Behaviour: `test_process_groups`."""
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp._common_utils import _set_fsdp_flattened

    assert room.is_flat_wrapper(FullyShardedDataParallel) and not room.is_flat_wrapper(nn.Linear)
    flat = nn.Parameter(torch.ones(4))
    assert not room.is_in_flat_parameter(flat)
    _set_fsdp_flattened(flat)
    assert all(map(room.is_in_flat_parameter, (flat, *flat.split(2))))


@needs("has_graph")
def a_view_that_lost_its_graph_has_had_one() -> None:
    base = torch.ones(2, requires_grad=True) * 1
    one, other = base.unbind()
    assert room.has_graph(one)
    other.detach().mul_(2)
    assert room.has_graph(one) and not room.has_graph(torch.ones(1))


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


@needs("finished_work", "finished_work_with")
def a_collective_that_nobody_ran_is_done() -> None:
    """Behaviour: `test_plan_sharded` and `test_retry_on_oom`."""
    assert isinstance(room.finished_work(), torch.ScriptObject)
    assert isinstance(room.finished_work_with([torch.ones(2)]), torch.ScriptObject)


@needs(
    "issued",
    "group_name_of",
    "rebuild_buckets",
    "has_rebuilt_buckets",
    "reset_reducer",
    "without_rebuilding",
    "without_reducing",
)
def collectives_are_counted_and_reducers_reset() -> None:
    """Behaviour: `test_retry_on_oom` and `test_plan_ranks`."""
    directory = tempfile.TemporaryDirectory()
    dist.init_process_group("gloo", store=dist.FileStore(f"{directory.name}/store", 1), rank=0, world_size=1)
    try:
        before = room.issued()
        names: list[Any] = []

        class Look(TorchDispatchMode):
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                names.append(room.group_name_of(func, args, kwargs or {}))
                return func(*args, **(kwargs or {}))

        model = DistributedDataParallel(nn.Linear(2, 2))
        begun = room.issued()
        with Look():
            model(torch.ones(1, 2)).sum().backward()
            dist.all_reduce(torch.ones(2))
        ((name, number),) = room.issued().items()
        assert begun[name] > before[name] and number - begun[name] == names.count(name) == 2
        assert not room.has_rebuilt_buckets(model)
        room.rebuild_buckets(model)
        assert room.has_rebuilt_buckets(model)
        with room.without_rebuilding(model), room.without_reducing(model):
            model(torch.ones(1, 2))
        room.reset_reducer(model)
        assert not room.has_rebuilt_buckets(model)
        model(torch.ones(1, 2)).sum().backward()
    finally:
        dist.destroy_process_group()
        directory.cleanup()


@needs("Work", "arrived")
def no_collective_is_waited_for_where_there_is_none() -> None:
    """Behaviour: `test_collectives`."""
    tensors = [torch.ones(2)]
    assert room.arrived(tensors) is tensors
    assert issubclass(room.Work, object) and not isinstance(torch.ones(2), room.Work)


@needs("alone_among", "ranks_of")
def a_rank_is_alone_among_others_that_are_not_there() -> None:
    """Behaviour: `test_planner_collectives`."""
    with room.alone_among(4):
        tensor = torch.ones(2)
        dist.all_reduce(tensor)
        assert dist.get_world_size() == 4 and tensor.tolist() == [1, 1]
        assert room.ranks_of(dist.group.WORLD.group_name) == [0, 1, 2, 3]
        assert room.ranks_of(dist.new_group([0, 2]).group_name) == [0, 2]
    assert not dist.is_initialized()


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


@needs("is_of_a_region")
def a_hook_of_a_region_is_known() -> None:
    """Behaviour: `test_saved_calls_once`."""
    packs: list[Any] = []

    def region(x: Tensor) -> Tensor:
        packs.append(room.innermost_pack_hook())
        return x.sin()

    reactivate.checkpoint(region)(torch.ones(2, requires_grad=True))
    torch.utils.checkpoint.checkpoint(region, torch.ones(2, requires_grad=True), use_reentrant=False)
    assert [room.is_of_a_region(pack) for pack in packs] == [True, False]


@needs("collective_writes")
def a_collective_tells_what_it_writes_to_as_long_as_somebody_listens() -> None:
    """Behaviour: `test_collectives`."""
    tensor = torch.ones(2)
    told: list[Any] = []
    group, op = torch.distributed.ProcessGroup, torch.ops._c10d_functional.all_reduce_
    before = vars(group)["allreduce"], op._op
    writes = room.collective_writes(told.append)
    for count in range(2):
        writes.begin()
        assert vars(group)["allreduce"] is not before[0]
        with pytest.raises(RuntimeError):  # there is no such group
            op(tensor, "sum", "of nobody")
        assert len(told) > count and all(given[0] is tensor for given in told)
    writes.end()
    assert op._op is not before[1]
    writes.end()
    assert (vars(group)["allreduce"], op._op) == before


@needs(
    "sharded_class",
    "sharded_in",
    "is_sharded",
    "is_gathered",
    "is_root",
    "rest",
    "sharding_state",
    "prepare_sharding",
    "are_on_host",
    "padded_sizes",
    "has_unreduced_gradients",
    "drop_unreduced_gradients",
)
def a_plain_module_is_not_sharded() -> None:
    """Behaviour: `test_plan_sharded` and `test_retry_on_oom`."""
    module = nn.Linear(2, 2)
    assert not room.is_root(module) and not room.has_unreduced_gradients([module])
    room.drop_unreduced_gradients([module])
    assert not isinstance(module, room.sharded_class()) and not room.is_sharded(module)
    assert room.sharded_in([module]) == []
    assert room.sharding_state(module) is None and not room.is_gathered(module)
    room.rest(room.sharding_state(module))
    room.prepare_sharding([module])
    assert not room.are_on_host([module]) and room.padded_sizes([module]) == {}


@needs("DistributedLayout", "are_made_of_tensors", "laid_out", "layout_of", "layouts_unseen")
def a_plain_tensor_has_no_layout_on_ranks() -> None:
    """Behaviour: `test_plan_offline`, on tensors of ranks."""
    assert room.layout_of(torch.ones(2)) is None
    assert not room.are_made_of_tensors([Tensor, nn.Parameter])
    with room.layouts_unseen():
        pass


@needs("compiled_call_of", "own_call_of", "called_through", "is_wrapped_by_compiler")
def the_call_of_a_module_is_replaced_for_a_time() -> None:
    module, x = nn.Linear(2, 2), torch.ones(1, 2)
    assert room.compiled_call_of(module) is None and not room.is_wrapped_by_compiler(module)
    own = room.own_call_of(module)
    with room.called_through({module: lambda x: own(x) + 1}):
        assert room.compiled_call_of(module) is not None
        assert torch.equal(module(x), own(x) + 1)
    assert room.compiled_call_of(module) is None and torch.equal(module(x), own(x))
    assert room.is_wrapped_by_compiler(torch.compile(module, backend="eager"))


@needs("compiled_function", "is_compiled_function")
def a_compiled_function_leads_to_the_function() -> None:
    def double(x: Tensor) -> Tensor:
        return x * 2

    compiled, disabled = torch.compile(double, backend="eager"), torch.compiler.disable(double)
    assert room.compiled_function(compiled) is room.compiled_function(disabled) is double
    assert room.is_compiled_function(compiled) and not room.is_compiled_function(disabled)
    assert room.compiled_function(double) is None and not room.is_compiled_function(double)


@needs("begin_of_compiled_call", "callback_of", "is_loaded")
def torch_says_when_compiled_code_begins() -> None:
    begin = room.begin_of_compiled_call()
    compiled = torch.compile(torch.sin, backend="eager")
    with mock.patch.object(importlib.import_module(begin.__module__), begin.__name__, side_effect=begin) as begun:
        compiled(torch.ones(2))
    assert room.is_loaded() and mock.call(room.callback_of(compiled)) in begun.mock_calls


@needs("with_many_graphs")
def more_graphs_of_a_function_are_made() -> None:
    config = importlib.import_module("torch._dynamo.config")
    before = config.recompile_limit
    with room.with_many_graphs(before + 8):
        assert config.recompile_limit == before + 8
    assert config.recompile_limit == before


@needs("has_budgets_in_graphs", "budget_in_graph")
def a_part_of_a_graph_has_a_budget() -> None:
    """Behaviour: `test_plan_compiled`."""
    if room.has_budgets_in_graphs:
        with pytest.raises(RuntimeError, match="inside a torch.compile region"), room.budget_in_graph(0.5):
            pass


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


@needs("last_script_graph", "count_of_profiled_runs", "is_profiling_graph", "is_compiled_script")
def torchscript_watches_one_call_and_compiles() -> None:
    assert room.count_of_profiled_runs() == 1
    scripted = torch.jit.CompilationUnit("def double_it(x):\n    return x * 2 + x\n").double_it
    before = room.last_script_graph()
    x = torch.ones(2, requires_grad=True)
    scripted(x)
    assert room.last_script_graph() is not before
    assert room.is_profiling_graph(room.last_script_graph())
    assert not room.is_compiled_script(scripted)
    scripted(x)
    assert not room.is_profiling_graph(room.last_script_graph())
    assert room.is_compiled_script(scripted)


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


@needs("leave_to_eager")
def frames_are_left_to_eager() -> None:
    traced: list[bool] = []

    def left(x: Tensor) -> Tensor:
        traced.append(torch.compiler.is_compiling())
        return x.sin()

    room.leave_to_eager(left.__code__)
    torch.compile(left, backend="eager")(torch.ones(2))
    assert traced == [False]


@needs("leave_out_of_graphs")
def a_function_is_called_and_not_traced() -> None:
    traced: list[bool] = []

    def left(x: Tensor) -> Tensor:
        traced.append(torch.compiler.is_compiling())
        return x.sin()

    room.leave_out_of_graphs(left)
    torch.compile(lambda x: left(x).cos(), backend="eager")(torch.ones(2))
    assert traced == [False]


@needs("prefer_version_used_last")
def versions_are_taken_in_order() -> None:
    """Behaviour: `test_compile.test_a_recomputation_runs_the_version_that_its_forward_pass_ran`."""
    assert callable(room.prefer_version_used_last)


@needs("checkpoint_in_graph", "NotTraced")
def dynamo_knows_torchs_checkpoint() -> None:
    found: list[str] = []

    def backend(graph: Any, inputs: Any) -> Any:
        found.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled = torch.compile(
            lambda x: room.checkpoint_in_graph(torch.sin, (x,), {}), backend=backend, fullgraph=True
        )
        compiled(torch.ones(2, requires_grad=True))
    assert "tag_activation_checkpoint" in found
    with pytest.raises(room.NotTraced):
        room.checkpoint_in_graph(torch.sin, (torch.ones(2, requires_grad=True),), {})


@needs("runs_while_traced")
def a_function_is_called_while_it_is_traced() -> None:
    called: list[int] = []

    def note() -> bool:
        called.append(1)
        return True

    room.runs_while_traced(note)

    def traced(x: Tensor) -> Tensor:
        return x.sin() if note() else x

    compiled = torch.compile(traced, backend="eager", fullgraph=True)
    for _ in range(2):
        compiled(torch.ones(2))
    assert called == [1]


@needs("runs_as_traced", "warn_of_running_as_traced")
def the_inside_of_a_traced_region_is_known() -> None:
    assert not room.runs_as_traced(torch.sin)
    with pytest.warns(UserWarning, match="keeps its activations"):
        room.warn_of_running_as_traced()


class _NoOps(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(func)


@needs("same", "is_tracing")
def hooks_may_keep_a_tensor_as_it_is() -> None:
    x = torch.ones(2)
    assert room.same(x) is x
    assert not room.is_tracing()


@needs("SavedTensor", "save_tensor", "SavedOnNode")
def a_saved_tensor_knows_its_version() -> None:
    for kind, save in ((room.SavedTensor, room.save_tensor), (room.SavedOnNode, room.SavedOnNode)):
        _look_at_saved(kind, save)


def _look_at_saved(kind: Any, save: Any) -> None:
    x = torch.ones(2, requires_grad=True) * 2
    saved = save(x, False)
    assert isinstance(saved, kind)
    assert saved.unpack().grad_fn is x.grad_fn
    x.detach().add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved.unpack()
    with _NoOps():
        assert save(x, False).unpack().shape == x.shape


@needs("cpu_generator_memory", "GeneratorMemory")
def the_memory_of_the_cpus_generator_is_found() -> None:
    memory = room.cpu_generator_memory()
    assert isinstance(memory, room.GeneratorMemory)
    assert [size for _, size in (*memory.seen, memory.spare, memory.whole)] == [13, 68, 1, 1, 16, 2540]


@needs("accelerator_device")
def the_accelerator_is_what_torch_says() -> None:
    device, public = room.accelerator_device(), torch.accelerator.current_accelerator()
    assert (device and device.type) == (public and public.type)


@needs("ask")
def a_question_is_a_call() -> None:
    assert room.ask(lambda: 3) == 3


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


@needs("is_distributed_run")
def there_is_a_question_whether_ranks_wait_for_each_other() -> None:
    assert not room.is_distributed_run()


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


@needs("register_device_module", "xla_runtime")
def a_device_type_without_a_module_gets_one() -> None:
    assert "torch_xla" in sys.modules or room.xla_runtime() is None
    assert not hasattr(torch, "hpu")
    module = ModuleType("torch.hpu")
    room.register_device_module("hpu", module)
    assert torch.get_device_module("hpu") is module
    del torch.hpu, sys.modules["torch.hpu"]  # type: ignore[attr-defined]


@needs("is_jit_tracing")
def torchscript_tells_that_it_traces() -> None:
    seen = []

    def traced(x: Tensor) -> Tensor:
        seen.append(room.is_jit_tracing())
        return x.sin()

    torch.jit.trace(traced, (torch.ones(2),))
    assert seen[0] and not room.is_jit_tracing()


@needs("STAND_INS", "is_aot_tracing")
def what_aot_autograd_traces_with_is_known() -> None:
    seen = []

    def traced(x: Tensor) -> Tensor:
        seen.append((room.is_aot_tracing(), isinstance(x, room.STAND_INS)))
        return x.sin()

    from functorch.compile import aot_function, make_boxed_func

    aot_function(traced, fw_compiler=lambda module, _: make_boxed_func(module))(torch.ones(2, requires_grad=True))
    assert seen and all(item == (True, True) for item in seen)
    assert not room.is_aot_tracing()


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


@needs("nodes_since", "saved_by", "replace_saved", "Rebuild")
def saved_tensors_of_nodes_are_replaced() -> None:
    x = torch.randn(4, requires_grad=True)
    middle = x * 2
    out = middle.sin().exp()
    nodes = list(room.nodes_since(out, middle.grad_fn))
    names = [node.name() for node in nodes]  # beside the leaf, whose number is the highest there is
    assert names[:3] == ["ExpBackward0", "SinBackward0", "MulBackward0"]
    kept, asked = middle.detach().clone(), []

    def rebuild() -> Tensor:
        asked.append("rebuilt")
        return kept

    (saved,) = room.saved_by(nodes[1])
    assert room.replace_saved(saved, lambda tensor: rebuild if torch.equal(tensor, kept) else None)
    assert not room.replace_saved(saved, lambda tensor: rebuild)  # what hooks have packed stays
    assert not room.replace_saved(room.saved_by(nodes[0])[0], lambda tensor: None)
    out.sum().backward()
    assert asked == ["rebuilt"]
    expected = x.detach().requires_grad_()
    (expected * 2).sin().exp().sum().backward()
    assert x.grad is not None and expected.grad is not None
    assert torch.equal(x.grad, expected.grad)


@needs("data_of")
def what_is_kept_can_be_asked_for() -> None:
    x = torch.ones(2)
    kept = room.data_of(room.save_tensor(x, False))
    assert kept is None or kept.data_ptr() == x.data_ptr()
    packed = object()
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: packed, lambda handle: x):
        saved = room.save_tensor(x, False)
    is_said = isinstance(room.data_of(saved), Tensor) is False
    assert is_said == hasattr(saved, "data")  # from torch 2.12 on; before, the hooks are run


@needs("saver_of")
def what_saves_a_tensor_is_known_by_its_frame() -> None:
    found: list[str] = []

    def pack(tensor: Tensor) -> Tensor:
        found.append(room.saver_of(sys._getframe(1)).f_code.co_name)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        room.save_tensor(torch.ones(2), False)
        room.SavedOnNode(torch.ones(2), False)
    assert found == ["what_saves_a_tensor_is_known_by_its_frame"] * 2


@needs("OpOverload", "OpOverloadPacket", "HigherOrderOperator", "qualified_name")
def ops_have_classes_and_names() -> None:
    assert room.builtin_functions.linear is torch.nn.functional.linear
    assert isinstance(torch.ops.aten.mm, room.OpOverloadPacket)
    assert isinstance(torch.ops.aten.mm.default, room.OpOverload)
    assert room.qualified_name(torch.ops.aten.mm) == "aten::mm"
    assert isinstance(torch.ops.higher_order.cond, room.HigherOrderOperator)
    assert torch.ops.higher_order.cond.name() == "cond"


@needs("returns_arguments")
def ops_that_return_arguments_are_known() -> None:
    aten = torch.ops.aten
    assert room.returns_arguments(aten.t.default) and room.returns_arguments(aten.add_.Tensor)
    assert not room.returns_arguments(aten.mm.default) and not room.returns_arguments(torch.ops.higher_order.cond)


@needs("written_arguments")
def a_schema_says_what_is_written_to() -> None:
    aten = torch.ops.aten
    assert room.written_arguments(aten.add.Tensor) == ()
    assert room.written_arguments(aten.t.default) == ()
    assert room.written_arguments(aten.add_.Tensor) == ((0, "self", False),)
    assert room.written_arguments(aten.mm.out) == ((2, "out", True),)
    assert room.written_arguments(torch.ops.higher_order.cond) == ()


@needs("written_values")
def test_values_that_ops_write_to() -> None:
    aten, x, room_for_it = torch.ops.aten, torch.ones(2, 2), torch.empty(2, 2)
    assert [item is x for item in room.written_values(aten.add_.Tensor, (x, 1), {})] == [True]
    assert [item is room_for_it for item in room.written_values(aten.mm.out, (x, x), {"out": room_for_it})] == [True]
    assert room.written_values(aten.add.Tensor, (x, x), {}) == []


@needs("tensor_positions")
def schemas_say_which_arguments_are_tensors() -> None:
    assert room.tensor_positions(torch.ops.aten.mul.Tensor) == (0, 1)
    assert room.tensor_positions(torch.ops.aten.add.Scalar) == (0,)


@needs("opaque_arguments")
def workspaces_of_recurrent_layers_are_opaque() -> None:
    assert room.opaque_arguments(torch.ops.aten.mkldnn_rnn_layer_backward.default) == {22, "workspace"}
    assert "reserve" in room.opaque_arguments(torch.ops.aten._cudnn_rnn_backward.default)
    assert not room.opaque_arguments(torch.ops.aten.mul.Tensor)


@needs("is_view")
def ops_that_look_at_no_element_are_told_from_others() -> None:
    aten = torch.ops.aten
    assert all(map(room.is_view, (aten.view.default, aten.transpose.int, aten.detach.default)))
    assert not any(map(room.is_view, (aten.sin.default, aten.add_.Tensor, aten.clone.default)))


@needs("call_counted")
def in_place_ops_on_lists_move_versions_in_a_dispatch_mode() -> None:
    class Counted(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return room.call_counted(func, args, kwargs)

    tensors = [torch.ones(2), torch.ones(3)]
    with Counted():
        torch._foreach_add_(tensors, 1.0)
        tensors[0].mul_(2.0)
    assert [tensor._version for tensor in tensors] == [2, 1]
    assert tensors[0].tolist() == [4.0, 4.0]


@needs("leaves_at_op", "tensors_at_op", "tensors_in")
def what_ops_take_is_listed() -> None:
    x, y = torch.ones(2), torch.ones(3)
    assert room.tensors_in((x, [None, 3]), {"out": {"y": (y,)}}) == [x, y]
    assert room.leaves_at_op(([x, None], {"out": (y, 2.0)})) == [x, y, 2.0]
    assert room.tensors_at_op(([x, None], {"out": (y, 2.0)})) == [x, y]


@needs("flatten", "unflatten")
def containers_are_flattened_and_put_back() -> None:
    x = torch.ones(2)
    assert room.flatten(x) == ([x], None)
    leaves, structure = room.flatten({"a": (x, None), "b": [3]})
    assert [leaf for leaf in leaves if leaf is not None] == [x, 3]
    assert room.unflatten(leaves, structure) == {"a": (x, None), "b": [3]}


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


@needs("is_of_checkpointing")
def hooks_of_checkpointing_are_told_from_those_of_users() -> None:
    def pack(tensor: Any) -> Any:
        return tensor

    assert not room.is_of_checkpointing(pack) and not room.is_of_checkpointing(None)
    assert room.is_of_checkpointing(room.not_a_users_hook(pack))
    seen: list[bool] = []

    def inside(x: Any) -> Any:
        seen.append(room.is_of_checkpointing(room.innermost_pack_hook()))
        return x.sin()

    torch.utils.checkpoint.checkpoint(inside, torch.ones(1, requires_grad=True), use_reentrant=False).backward()
    assert seen == [True, True]


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


@needs("named_in_graph", "names_reach_graphs", "node_being_traced", "SITE")
def a_traced_op_says_where_it_comes_from() -> None:
    """Behaviour: `test_policies_in_graph`."""
    assert room.named_in_graph("name", torch.sin, (torch.zeros(1),), {}) == 0
    assert not room.node_being_traced().get("custom")


@needs("COMPILED_CODE", "compiled_code_is_shown")
def torch_notes_that_compiled_code_is_shown() -> None:
    """Behaviour: `test_compute_intensive`."""
    shown = room.compiled_code_is_shown
    for _ in range(2):
        shown.begin()
        shown.begin()
        shown.end()
        assert is_in_torch_dispatch_mode()
        shown.end()
        assert not is_in_torch_dispatch_mode()


@needs("Flag", "FLAGS")
def flags_can_be_read_and_written_back() -> None:
    values = [flag.read() for flag in room.FLAGS]
    for flag, value in zip(room.FLAGS, values, strict=True):
        flag.write(value)
    # Some releases call the default precision "none" until it is set, and "ieee" afterwards.
    after = ["none" if value == "none" else flag.read() for flag, value in zip(room.FLAGS, values, strict=True)]
    assert after == values
    assert len({flag.name for flag in room.FLAGS}) == len(values)


@needs()
def the_older_precision_flag_can_be_asked_when_only_the_newer_ones_have_a_word_for_it() -> None:
    assert room._read_float32_matmul() == torch.get_float32_matmul_precision()
    precision = room._fp32_precision("mkldnn", "matmul")
    before = precision.read()
    precision.write("tf32")
    try:
        assert room._read_float32_matmul() in (None, "highest")  # None where torch raises
        room._write_float32_matmul(None)
        assert precision.read() == "tf32"
    finally:
        precision.write(before)


@needs("leave_autocast")
def autocast_contexts_are_left() -> None:
    for _ in range(3):
        torch.autocast("cpu").__enter__()
    room.leave_autocast(1)
    assert torch.autocast_decrement_nesting() == 0
    torch.set_autocast_enabled("cpu", False)


@needs("has_memory")
def classes_that_only_have_a_name_are_told_from_others() -> None:
    class Named(Tensor):
        pass

    class Made(Tensor):
        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    assert room.has_memory(Tensor) and room.has_memory(Named) and room.has_memory(nn.Parameter)
    assert not room.has_memory(Made)


@needs("without_memory")
def a_tensor_of_ours_has_a_shape_and_no_memory() -> None:
    class Empty(Tensor):
        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return torch.ones(3)

    like = torch.zeros(4, 6)[:, ::2]
    found = room.without_memory(Empty, like, torch.bfloat16)
    assert type(found) is Empty
    assert (found.shape, found.stride(), found.dtype) == (like.shape, like.stride(), torch.bfloat16)
    with pytest.raises(RuntimeError):  # there is no memory to point to
        found.untyped_storage().data_ptr()
    assert torch.equal(found.exp(), torch.ones(3))


@needs("is_any_autocast_enabled")
def autocast_is_noticed() -> None:
    assert not room.is_any_autocast_enabled()
    with torch.autocast("cpu"):
        assert room.is_any_autocast_enabled()


@needs("close_checkpoints_within")
def checkpoints_that_an_error_went_through_are_closed() -> None:
    """Behaviour: `test_exceptions`."""
    from torch.utils.checkpoint import checkpoint

    before = room.innermost_pack_hook()
    try:
        checkpoint(torch.linalg.inv, torch.zeros(2, 2, requires_grad=True), use_reentrant=False)
    except torch.linalg.LinAlgError as error:
        room.close_checkpoints_within(error)
        assert room.innermost_pack_hook() is before
    else:
        raise AssertionError("the error went through")


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


def test_what_is_needed() -> None:
    check_each({check.__name__: check for check in CHECKS.values()})


def names_of(part: ModuleType) -> set[str]:
    """Names that other rooms may import from a file."""
    tree = ast.parse(Path(str(part.__file__)).read_text())
    imported = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    return {
        name
        for name, value in vars(part).items()
        if not name.startswith("_") and not isinstance(value, ModuleType) and name not in imported
    }


def test_every_name_is_listed() -> None:
    assert set().union(*map(names_of, PARTS)) == set(CHECKS)


def private_names_of_torch(path: Path) -> list[str]:
    """Imports of private torch names, and attributes `torch._x`."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            parts = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            found += [part for part in parts if part.startswith("_")]
        elif isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            root, path = node.value, []
            while isinstance(root, ast.Attribute):
                path.append(root.attr)
                root = root.value
            if (
                isinstance(root, ast.Name) and root.id in ("torch", "_torch") and "ops" not in path
            ):  # ops have such names
                found.append(node.attr)
    return found


WITHOUT = """
import sys, torch
import torch.testing._internal.distributed.fake_pg
from operator import attrgetter
for path in sys.argv[1:]:
    parent, _, name = path.rpartition(".")
    owner = attrgetter(parent)(torch) if parent else torch
    if hasattr(owner, name):
        delattr(owner, name)
from reactivate._torch import dynamo, ops
from reactivate._torch.private_api import ways
print(len(ways), sum(way.is_fast for way in ways))
import reactivate._region.region
"""


def test_missing_names_stop_no_import() -> None:
    """Not even all of them at once, but for those that torch itself does not do without."""
    names = [name.removeprefix("torch.") for way in ways for name in way.names]
    own = ("_C._accelerator_getAccelerator", "autograd.Variable._execution_engine.queue_callback")
    names = [name for name in names if name not in own]
    assert len(names) > 40
    done = subprocess.run([sys.executable, "-c", WITHOUT, *names], capture_output=True, text=True, cwd=PACKAGE.parent)
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout.split()[0]) > 30 > 5 > int(done.stdout.split()[1])


def test_a_missing_name_is_named_where_it_is_used() -> None:
    assert find("torch._C._autograd.SavedTensor") is torch._C._autograd.SavedTensor
    missing = find("torch._C._autograd._no_such_name")
    assert is_missing(missing) and is_missing(find("torch._no_such_module.name.of_it"))
    assert not isinstance(3, missing)
    with pytest.raises(UnsupportedError, match=r"torch\._C\._autograd\._no_such_name"):
        missing(1)


@pytest.fixture
def a_list_of_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private_api, "ways", [])


@pytest.mark.usefixtures("a_list_of_ways")
def test_the_fastest_way_that_does_what_is_asked_is_taken() -> None:
    name = "torch._C._autograd._get_sequence_nr"

    def fails(found: Any) -> bool:
        raise RuntimeError(found)

    right, wrong = (lambda found: found() >= 0), (lambda found: found() < 0)
    fast = torch._C._autograd._get_sequence_nr
    assert resolve_private("it", name, probe=right, public=abs) is fast
    assert resolve_private("it", name, probe=wrong, public=abs) is abs
    assert resolve_private("it", name, probe=fails, public=abs) is abs
    assert resolve_private("it", name, probe=fails, without=max) is max
    assert resolve_private("it", name, name, probe=lambda *found: False, public=(abs, max)) == (abs, max)
    assert is_missing(resolve_private("it", name, probe=wrong))
    assert all(map(is_missing, resolve_private("it", name, "torch.no_such", probe=lambda *found: True)))
    assert [way.is_fast for way in private_api.ways] == [True, *[False] * 6]


def test_what_has_no_public_way_says_what_is_lost() -> None:
    page = " ".join((PACKAGE.parent / "docs" / "torch-names.md").read_text(encoding="utf-8").split())
    for way in ways:
        for name in way.names:
            assert f"`{name}`" in page, name
        assert way.what in page, way.what
        assert way.lost in page, way.lost


@pytest.mark.usefixtures("a_list_of_ways")
def test_a_layout_that_is_not_as_expected_is_not_used() -> None:
    assert layout("it")(lambda: 3)() == 3
    assert layout("it")(lambda: None)() is None
    assert layout("it")(lambda: 1 // 0)() is None
    assert [way.is_fast for way in private_api.ways] == [True, False, False]


def test_probes_do_not_depend_on_what_is_around_the_import() -> None:
    code = (
        "import torch\n"
        "with torch.inference_mode(), torch.no_grad(), torch.device('meta'):\n"
        "    from reactivate._torch import dynamo, ops\n"
        "from reactivate._torch.private_api import ways\n"
        "print(*(way.what for way in ways if not way.is_fast), sep='; ')\n"
        "print(torch.is_inference_mode_enabled(), torch.is_grad_enabled())\n"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=PACKAGE.parent)
    slow = "; ".join(way.what for way in ways if not way.is_fast and "NumPy" not in way.what)
    assert found.stdout.splitlines() == [slow, "False True"]


# Public in all but name: the module in which torch documents how to write a mode.
DOCUMENTED = {"_python_dispatch"}


def test_private_names_stand_in_one_room_only() -> None:
    files = [path for path in PACKAGE.rglob("*.py") if path.parent.name != "_torch"]
    found = {str(path): set(private_names_of_torch(path)) - DOCUMENTED for path in files}
    assert len(found) > 200 and not {path: names for path, names in found.items() if names}


def test_the_search_for_private_names_finds_them_where_they_are() -> None:
    files = (PACKAGE / "_torch").glob("*.py")
    assert len([name for path in files for name in private_names_of_torch(path)]) > 10


def test_probes_see_a_draw() -> None:
    """Python's own generator has no private name in torch, but a private layout."""
    state = random.getstate()
    before = STREAMS.now()
    assert STREAMS.now() is before
    random.random()
    assert STREAMS.now() is not before
    random.setstate(state)

"""Needs of training on several ranks: collectives, sharded modules, and tensors with a layout."""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
import torch
import torch.distributed as dist
from needs import needs, room
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode


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


@needs("is_distributed_run")
def there_is_a_question_whether_ranks_wait_for_each_other() -> None:
    assert not room.is_distributed_run()

"""Needs of ops: their names, their schemas, and the containers that they take and return."""

from __future__ import annotations

from typing import Any

import torch
from needs import needs, room
from torch.utils._python_dispatch import TorchDispatchMode


@needs("registered_containers", "leaves_with_paths")
def containers_of_libraries_are_flattened() -> None:
    node = room.registered_containers[dict]
    children, context = node.flatten_fn({"a": 1, "b": 2})
    assert node.unflatten_fn(children, context) == {"a": 1, "b": 2}
    assert room.leaves_with_paths([0, {"b": 1}]) == [("[0]", 0), ("[1]['b']", 1)]


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

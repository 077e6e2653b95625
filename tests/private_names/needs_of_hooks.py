"""Needs of the hooks on saved tensors: who pushed them, which of them are the user's, and what they are given."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from needs import needs, room
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import reactivate


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

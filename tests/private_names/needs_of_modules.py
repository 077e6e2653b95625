"""Needs of modules, their classes and their attributes: how they are called, and which tensors have a memory."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from needs import needs, room
from torch import Tensor, nn


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

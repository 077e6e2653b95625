"""The state that `fully_shard` keeps of a model beside its parameters: put aside for a step on fake tensors.

It has each parameter's part once more, as it is gathered from, and room into which the whole is gathered. Its hooks run in a
simulated step as in a real one, so that they find fake tensors there, and whatever they change is as it was afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.nn import Module

from reactivate._torch.modules import (
    drop_unreduced_gradients,
    is_gathered,
    is_root,
    rest,
    sharded_in,
    sharding_state,
)

_LIBRARY = "torch.distributed.fsdp"
_CONTAINERS = (list, dict, set)
_RESET = "reset_iter_state"  # newer versions of torch have a name for that


@contextmanager
def sharding_faked(modules: Iterable[Module], fake: Callable[[Any], Any]) -> Iterator[None]:
    """Put fake tensors into the state of sharded modules; afterwards it is as it was, and so are the modules' own dicts."""
    sharded = sharded_in(modules)
    objects = _objects_of(sharded)
    dicts = [part for module in sharded for part in vars(module).values() if isinstance(part, dict)]
    put_back = _restoring([*(vars(item) for item in objects), *dicts])
    try:
        for item in objects:
            _fake_all(vars(item), fake)
        yield
    finally:
        put_back()


def resetting_sharding(modules: Iterable[Module]) -> Callable[[], None]:
    """Bring sharded modules to where they are between two steps, and return what brings them there after an error in one."""
    sharded = sharded_in(modules)
    for module in sharded:
        module.reshard()  # type: ignore[operator]  # weights that an evaluation has left gathered

    def reset() -> None:
        for module in filter(is_root, sharded):
            getattr(module, _RESET)()
        drop_unreduced_gradients(sharded)

    if all(hasattr(module, _RESET) for module in sharded):
        return reset
    put_back = _restoring(vars(item) for item in _objects_of(sharded))

    def reset_all() -> None:
        for module in sharded:
            module.reshard()  # type: ignore[operator]
        put_back()
        drop_unreduced_gradients(sharded)

    return reset_all


@contextmanager
def between_steps(model: Module) -> Iterator[None]:
    """Inside, a sharded model is as it is between two steps, also in the midst of its forward. All ranks come here together.

    What has been gathered for the forward is gathered again afterwards.
    """
    sharded = sharded_in(model.modules())
    gathered = [module for module in sharded if is_gathered(module)]
    objects = _objects_of(sharded)
    put_back = _restoring(vars(item) for item in objects)
    for item in objects:
        rest(item)
    for module in sharded:
        module.reshard()  # type: ignore[operator]
    try:
        yield
    finally:
        for module in gathered:
            module.unshard()  # type: ignore[operator]
        put_back()


def _objects_of(sharded: Iterable[Module]) -> list[Any]:
    """List the library's objects that can be reached from the state of these modules, each once."""
    found: dict[int, Any] = {}
    todo = list(map(sharding_state, sharded))
    while todo:
        item = todo.pop()
        if isinstance(item, dict):
            todo += item.values()
        elif isinstance(item, (list, tuple, set)):
            todo += item
        elif id(item) not in found and _is_of_library(item):
            found[id(item)] = item
            todo += vars(item).values()
    return list(found.values())


def _is_of_library(item: Any) -> bool:
    is_state = not isinstance(item, (Module, Tensor, type)) and hasattr(item, "__dict__")
    return is_state and type(item).__module__.startswith(_LIBRARY)


def _restoring(namespaces: Iterable[dict[Any, Any]]) -> Callable[[], None]:
    """Return what puts namespaces back as they are now, and what lies in their lists, dicts and sets."""
    before = [(namespace, dict(namespace)) for namespace in namespaces]
    inside = (value for _, items in before for value in items.values() if isinstance(value, _CONTAINERS))
    contents = [(value, value.copy()) for value in inside]

    def put_back() -> None:
        for namespace, items in before:
            namespace.clear()
            namespace.update(items)
        for container, content in contents:
            container.clear()
            container.extend(content) if isinstance(container, list) else container.update(content)

    return put_back


def _fake_all(namespace: dict[str, Any], fake: Callable[[Any], Any]) -> None:
    """Replace the tensors in a namespace, and in its lists; the library makes those anew whose memory it has let go of."""
    for name, value in list(namespace.items()):
        if isinstance(value, Tensor):
            if _is_empty(value):
                del namespace[name]
            else:
                namespace[name] = fake(value)
        elif isinstance(value, list) and any(isinstance(item, Tensor) for item in value):
            namespace[name] = [fake(item) for item in value if not (isinstance(item, Tensor) and _is_empty(item))]


def _is_empty(tensor: Tensor) -> bool:
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.numel() > 0 and local.untyped_storage().nbytes() == 0

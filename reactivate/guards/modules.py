"""Modules (Rule 12): a replay sees them as the forward pass did, and does not advance them a second time.

Of every module that the region can reach:

- attributes (`training`, a counter, a list of losses) are what they were, and what the replay does to them is undone;
- buffers, and tensors in attributes, that the forward pass wrote to are read as they were before it;
- parameters must not have been written to: that is refused (Rule 15);
- a module with `replay_state()` and `load_replay_state(state)` keeps whatever else it needs.

What a tensor held has to be copied before it is known whether the forward pass will write to it. So the first call of a
module in a mode (training or not) copies all its buffers, and later ones copy those that were written to. Floating-point
buffers of one dimension are copied in every training call: batch norm's kernels write to running statistics
without a new version, so that nobody can tell. So are scalars, which are cheap.
"""

from __future__ import annotations

import functools
from collections import OrderedDict, defaultdict, deque
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from operator import is_
from types import TracebackType
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.jit import ScriptModule
from torch.nn import Module

from reactivate._compat import copy_unseen, is_distributed, may_be_written_unseen, write_unseen
from reactivate._standin import StandIn, copy_of
from reactivate._types import Call, Guard
from reactivate.errors import MutationError
from reactivate.guards._base import undisturbed


class Stateful(Protocol):
    """A module with state that is neither in buffers nor in attributes: in nested objects, in a kernel library."""

    def replay_state(self) -> Any:
        """A copy of the state."""

    def load_replay_state(self, state: Any) -> None:
        """Set what `replay_state` gave."""


class Modules(Guard):
    """Attributes, buffers and parameters of modules.

    Args:
        copies_all: copy every buffer at every call, whether the forward pass is known to write to it or not.
    """

    name = "modules"

    def __init__(self, *, copies_all: bool = False) -> None:
        self._copies_all = copies_all
        # Does the forward pass write to it? {module: {(name, training): written}}
        self._known: WeakKeyDictionary[Module, dict[tuple[Any, bool], bool]] = WeakKeyDictionary()

    def before(self, call: Call) -> _Seen | None:
        modules = call.modules
        if not modules:
            return None
        seen = _Seen(modules)
        namespaces, registries, versions = seen.namespaces, seen.registries, seen.parameters
        for module in modules:
            kind = _kind_of(type(module))  # type: ignore[arg-type]
            if kind is _SCRIPTED:  # its tensors live in C++
                self._see_script_module(seen, module)
                continue
            attributes = module.__dict__
            namespaces.append((attributes, copy_of(attributes)))
            parameters, buffers = attributes["_parameters"], attributes["_buffers"]
            if parameters:
                registries.append((parameters, parameters.copy()))
                for parameter in parameters.values():
                    if parameter is not None:
                        versions.append((parameter, parameter._version))
            if buffers:
                registries.append((buffers, buffers.copy()))
                for name, buffer in buffers.items():
                    if buffer is not None:
                        self._hold(seen, module, buffers, name, buffer)
            if kind is _USERS:
                self._see_attributes(seen, module, attributes)
        return seen

    def _see_attributes(self, seen: _Seen, module: Module, attributes: dict[str, Any]) -> None:
        for name, value in attributes.items():
            kind = type(value)
            if kind in _WITHOUT_STATE or name in _OF_EVERY_MODULE:
                continue
            if issubclass(kind, Tensor):
                self._hold(seen, module, attributes, name, value)
            elif kind in _CONTAINERS:
                seen.containers.append((value, value.copy()))
                for key, item in value.items() if isinstance(value, dict) else enumerate(value):
                    if isinstance(item, Tensor):
                        self._hold(seen, module, value, key, item)
        if hasattr(type(module), "replay_state"):
            stateful: Any = module
            seen.states.append((module, stateful.replay_state()))

    def _hold(self, seen: _Seen, module: Module, namespace: Any, name: Any, tensor: Tensor) -> None:
        if tensor.requires_grad:  # the product of a forward pass, not state
            seen.held.append(_Held(module, namespace, name, tensor, False))
            seen.copies.append(None)
            return
        # A scalar counts something, mostly. Of a module that another region runs it is written to unexpectedly, too.
        is_silent = module.training and (tensor.ndim == 0 or may_be_written_unseen(tensor))
        seen.held.append(_Held(module, namespace, name, tensor, is_silent))
        is_needed = (
            is_silent or self._copies_all or self._known.get(module, _NOTHING).get((name, module.training), True)
        )
        seen.copies.append(copy_unseen(tensor) if is_needed else None)

    def _see_script_module(self, seen: _Seen, module: Module) -> None:
        for name, buffer in module.named_buffers(recurse=False):
            seen.held.append(_Held(module, None, name, buffer, True))
            seen.copies.append(copy_unseen(buffer))
        seen.parameters += [(item, item._version) for item in module.parameters(recurse=False)]

    def after(self, token: _Seen | None) -> _Seen | None:
        if token is None:
            return None
        for tensor, version in token.parameters:
            if tensor._version != version:
                raise token.refuse(tensor, "was written to in the forward pass of a region that reads it")
        if not token.held:
            return token
        return token.keeping([self._what_to_keep(token, *pair) for pair in zip(token.held, token.copies)])

    def _what_to_keep(self, token: _Seen, held: _Held, copy: Tensor | None) -> Tensor | None:
        if held.is_silent:
            return copy
        is_written = held.tensor._version != held.version
        self._known.setdefault(held.module, {})[held.name, held.module.training] = is_written
        if is_written and copy is None:
            raise token.refuse(
                held.tensor,
                "was written to in the forward pass of a region, after calls that did not write to it, so that no copy "
                "had been made of what it held",
            )
        return copy if is_written else None

    def replay(self, snapshot: _Seen) -> AbstractContextManager[Any]:
        rewound = _Rewound(snapshot)
        return undisturbed(rewound) if snapshot.is_state() else rewound


_CONTAINERS = frozenset({list, dict, set, OrderedDict, defaultdict, deque})
_OF_EVERY_MODULE = frozenset(Module().__dict__)
_NOTHING: Mapping[Any, bool] = {}


_WITHOUT_STATE = frozenset({type(None), bool, int, float, str})
# Kinds of modules: torch's own, whose attributes are plain values; the user's; TorchScript's.
_TORCHS, _USERS, _SCRIPTED = range(3)


@functools.cache
def _kind_of(kind: type) -> int:
    if issubclass(kind, ScriptModule):
        return _SCRIPTED
    return _TORCHS if kind.__module__.startswith("torch.nn.modules.") else _USERS


class _Held:
    """A tensor that is state, as it was before the forward pass."""

    __slots__ = ("is_silent", "module", "name", "namespace", "tensor", "version")

    def __init__(self, module: Module, namespace: Any, name: Any, tensor: Tensor, is_silent: bool) -> None:
        self.module = module
        self.namespace = namespace  # where a replay puts a copy; None where it has to write into the tensor
        self.name = name
        self.tensor = tensor
        self.version = tensor._version
        self.is_silent = is_silent


class _Seen:
    """Modules before a forward pass.

    Attributes:
        namespaces: (a module's `__dict__`, a copy of it).
        registries: (its `_parameters` or `_buffers`, a copy of it).
        parameters: (parameter, version).
        held, copies: tensors that are state, and what they held, None where that is not needed.
        containers: (a list or dict among the attributes, a copy of it).
        states: (a `Stateful` module, its state).
    """

    __slots__ = ("containers", "copies", "held", "modules", "namespaces", "parameters", "registries", "states")

    def __init__(self, modules: Sequence[Module]) -> None:
        self.modules = modules
        self.namespaces: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self.registries: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self.parameters: list[tuple[Tensor, int]] = []
        self.held: list[_Held] = []
        self.copies: list[Tensor | None] = []
        self.containers: list[tuple[Any, Any]] = []
        self.states: list[tuple[Any, Any]] = []

    def keeping(self, copies: list[Tensor | None]) -> _Seen:
        """The same with other copies."""
        kept = _Seen(self.modules)
        for name in _Seen.__slots__:
            setattr(kept, name, getattr(self, name))
        kept.copies = copies
        return kept

    def is_state(self) -> bool:
        """Whether there is anything that a replay has to set back."""
        return bool(self.containers or self.states) or any(content is not None for content in self.copies)

    def fresh_copies(self) -> list[Tensor | None]:
        """Copies of the copies: a replay may write to them, and there may be another one."""
        fresh = [None if content is None else copy_unseen(content) for content in self.copies]
        views: dict[int, list[int]] = {}
        for index, held in enumerate(self.held):
            if held.tensor._is_view() and fresh[index] is not None:
                views.setdefault(id(held.tensor._base), [])
        if views:  # what is written to one of them is read through the others
            for index, held in enumerate(self.held):
                key = id(held.tensor._base) if held.tensor._is_view() else id(held.tensor)
                if key in views and fresh[index] is not None:
                    views[key].append(index)
            for group in views.values():
                _share_memory(group, self.held, fresh)
        return fresh

    def refuse(self, tensor: Tensor, what: str) -> MutationError:
        """The error for a tensor that a replay cannot read as it was."""
        return MutationError(
            f"`{self._name_of(tensor)}`, of shape {list(tensor.shape)}, {what}: a replay would compute other "
            "gradients. Write to it outside of the region or after the backward; or give its module `replay_state()` "
            "and `load_replay_state(state)`; or take care of modules yourself, with guards=DEFAULT.without('modules')."
        )

    def _name_of(self, tensor: Tensor) -> str:
        for root in self.modules:  # the outermost come first
            for prefix, module in root.named_modules():
                for name, value in (*vars(module).items(), *module._parameters.items(), *module._buffers.items()):
                    if value is tensor:
                        return ".".join(filter(None, (type(root).__name__, prefix, name)))
        return "a tensor of a module"


class _Rewound:
    """Modules as they were, for as long as the context lasts."""

    __slots__ = ("containers", "contents", "namespaces", "registries", "seen", "states")

    def __init__(self, seen: _Seen) -> None:
        self.seen = seen

    def __enter__(self) -> None:
        self._refuse_writes()
        self._read()
        try:
            self._write()
        except BaseException as error:  # a module's own `load_replay_state`
            self.__exit__(type(error), error, error.__traceback__)
            raise

    def _read(self) -> None:
        seen = self.seen
        # Mostly nothing has changed since, and what is to be put back is the copy that there is.
        self.namespaces = [
            before if _is_equal(namespace, before) else copy_of(namespace) for namespace, before in seen.namespaces
        ]
        self.registries = [
            before if _is_identical(registry, before) else registry.copy() for registry, before in seen.registries
        ]
        self.containers = [container.copy() for container, _ in seen.containers]
        self.contents = [copy_unseen(held.tensor) for held in seen.held if held.namespace is None]
        self.states = [module.replay_state() for module, _ in seen.states]

    def _write(self) -> None:
        seen = self.seen
        fresh = seen.fresh_copies()
        for (namespace, before), now in zip(seen.namespaces, self.namespaces):
            if now is not before:
                _assign(namespace, before)
        for (registry, before), now in zip(seen.registries, self.registries):
            if now is not before:
                _assign(registry, {name: _registered(item, now.get(name)) for name, item in before.items()})
        for container, before in seen.containers:
            _fill(container, before)
        for held, content in zip(seen.held, fresh):
            if content is not None and held.namespace is not None:
                held.namespace[held.name] = content
            elif content is not None:
                write_unseen(held.tensor, content)
        for module, state in seen.states:
            module.load_replay_state(state)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with ExitStack() as stack:
            stack.callback(self._restore)  # last, whatever a module's own `load_replay_state` does
            for (module, _), state in zip(self.seen.states, self.states):
                stack.callback(module.load_replay_state, state)

    def _restore(self) -> None:
        seen = self.seen
        in_place = [held.tensor for held in seen.held if held.namespace is None]
        for tensor, content in zip(in_place, self.contents):
            write_unseen(tensor, content)
        for (container, _), now in zip(seen.containers, self.containers):
            _fill(container, now)
        for (registry, _), now in zip(seen.registries, self.registries):
            if not _is_identical(registry, now):
                _assign(registry, now)
        for (namespace, _), now in zip(seen.namespaces, self.namespaces):
            if not _is_equal(namespace, now):
                _assign(namespace, now)

    def _refuse_writes(self) -> None:
        seen = self.seen
        for tensor, version in seen.parameters:
            if tensor._version != version:
                raise seen.refuse(tensor, "has been modified by an inplace operation since the forward pass read it")
        for held, content in zip(seen.held, seen.copies):
            if content is None and held.tensor._version != held.version:
                raise seen.refuse(
                    held.tensor, "has been modified by an inplace operation since the forward pass read it"
                )


def _share_memory(group: list[int], held: list[_Held], fresh: list[Tensor | None]) -> None:
    """Let those of `fresh` be views of one memory, as the tensors that they stand for are."""
    storage = held[group[0]].tensor.untyped_storage()
    memory = torch.empty(storage.nbytes(), dtype=torch.uint8, device=storage.device)
    for index in group:
        tensor, content = held[index].tensor, fresh[index]
        assert content is not None
        view = memory.view(tensor.dtype).as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())
        fresh[index] = view.copy_(content)


def _registered(before: Any, now: Any) -> Any:
    """What a parameter or buffer is to be in the replay.

    As it was (`functional_call` swaps parameters for the time of a forward pass), but for what a sharding library moves
    between forms of its own: that knows better which one is needed now.
    """
    if before is None or now is None:
        return before
    is_sharded = is_distributed(before) or is_distributed(now) or before.shape != now.shape
    return now if is_sharded else before


def _is_equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    # Comparing dicts compares identities first and runs in C; only an attribute that was assigned to is asked whether
    # it equals the old one, and that may be a tensor or an array, which do not say yes or no.
    try:
        return one == other
    except Exception:
        return False


def _is_identical(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return len(one) == len(other) and all(map(is_, one.values(), other.values()))


def _assign(namespace: dict[str, Any], values: dict[str, Any]) -> None:
    """Give `namespace` the contents `values`, touching only what differs."""
    for name in [name for name in namespace if name not in values]:
        if not isinstance(namespace[name], StandIn):  # of another thread, and no state
            del namespace[name]
    for name, value in values.items():
        now = namespace.get(name, _NOTHING)
        if now is not value and not isinstance(now, StandIn):
            namespace[name] = value


def _fill(container: Any, values: Any) -> None:
    container.clear()
    (container.extend if isinstance(container, (list, deque)) else container.update)(values)

"""What modules were before a forward pass, and the context in which they are that again."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from itertools import chain
from operator import attrgetter, is_, itemgetter
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from reactivate._compat import copy_unseen, equal_unseen, is_distributed, write_unseen
from reactivate._standin import StandIn, copies_of
from reactivate.errors import MutationError
from reactivate.guards._watch import WatchedReads

_VERSION = attrgetter("_version")
_PARAMETERS, _BUFFERS = itemgetter("_parameters"), itemgetter("_buffers")
_NOTHING = object()


class Held:
    """A tensor that is state, as it was before the forward pass."""

    __slots__ = ("is_silent", "module", "name", "namespace", "tensor", "version")

    def __init__(self, module: Module, namespace: Any, name: Any, tensor: Tensor, is_silent: bool) -> None:
        self.module = module
        self.namespace = namespace  # where a replay puts a copy; None where it has to write into the tensor
        self.name = name
        self.tensor = tensor
        self.version = tensor._version
        self.is_silent = is_silent


Namespaces = list[dict[str, Any]]


class ModuleState:
    """Modules before a forward pass.

    Attributes:
        namespaces, attributes: every module's `__dict__`, and copies of them.
        registries, registered: its `_parameters` and `_buffers` where there are any, and copies of them.
        parameters, versions: every parameter, and its version.
        held, copies: tensors that are state, and what they held, None where that is not needed.
        containers: (a list or dict among the attributes, a copy of it).
        states: (a `Stateful` module, its state).
    """

    __slots__ = (
        *("attributes", "containers", "copies", "held", "modules", "namespaces", "parameters", "registered"),
        *("registries", "states", "versions"),
    )

    def __init__(self, modules: Sequence[Module]) -> None:
        self.modules = modules
        # Of all modules at once, as far as possible in C: this runs for every region.
        self.namespaces: Namespaces = list(map(vars, modules))
        self.attributes: Namespaces = copies_of(self.namespaces)
        self.registries: Namespaces = list(filter(None, map(_PARAMETERS, self.namespaces)))
        self.parameters: list[Tensor] = [item for item in _values_of(self.registries) if item is not None]
        self.registries += filter(None, map(_BUFFERS, self.namespaces))
        self.registered: Namespaces = list(map(dict.copy, self.registries))
        self.versions: list[int] = list(map(_VERSION, self.parameters))
        self.held: list[Held] = []
        self.copies: list[Tensor | None] = []
        self.containers: list[tuple[Any, Any]] = []
        self.states: list[tuple[Any, Any]] = []

    def watch(self, parameters: Iterable[Tensor]) -> None:
        """Parameters that are not in any registry."""
        for parameter in parameters:
            self.parameters.append(parameter)
            self.versions.append(parameter._version)

    def keeping(self, copies: list[Tensor | None]) -> ModuleState:
        """The same with other copies."""
        kept: ModuleState = object.__new__(ModuleState)
        for name in ModuleState.__slots__:
            setattr(kept, name, getattr(self, name))
        kept.copies = copies
        return kept

    def is_written_to(self) -> bool:
        """Whether a replay has to set back more than attributes that hold still."""
        return bool(self.containers or self.states) or any(content is not None for content in self.copies)

    def has_changed(self) -> bool:
        """Whether anything may be other than it was."""
        return (
            bool(self.held or self.containers or self.states)
            or not _are_equal(self.namespaces, self.attributes)
            or not _are_identical(self.registries, self.registered)
        )

    def written_parameters(self) -> list[Tensor]:
        """The parameters that have another version by now."""
        if list(map(_VERSION, self.parameters)) == self.versions:
            return []
        return [item for item, version in zip(self.parameters, self.versions) if item._version != version]

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


class RewoundModules:
    """Modules as they were, for as long as the context lasts."""

    __slots__ = ("attributes", "containers", "contents", "registered", "state", "states", "watch")
    containers: list[tuple[Any, Any]]
    contents: list[Tensor]
    states: list[Any]

    def __init__(self, state: ModuleState) -> None:
        self.state = state

    def __enter__(self) -> None:
        self.watch: WatchedReads | None = None
        self._read()
        try:
            self._write()
        except BaseException as error:  # a module's own `load_replay_state`
            self.__exit__(type(error), error, error.__traceback__)
            raise
        written = self._written()
        if written:
            self.watch = WatchedReads(written, self._refusal)
            self.watch.__enter__()

    def _written(self) -> list[Tensor]:
        """What was written to since, and is not read as it was."""
        state = self.state
        written = state.written_parameters()
        for held, content in zip(state.held, state.copies):
            if content is None and held.tensor._version != held.version:
                written.append(held.tensor)
        return written

    def _refusal(self, tensor: Tensor) -> MutationError:
        return self.state.refuse(tensor, "has been modified by an inplace operation since the forward pass read it")

    def _read(self) -> None:
        state = self.state
        # Mostly nothing has changed since, and what is to be put back is the copy that there is.
        self.attributes, self.registered = state.attributes, state.registered
        if not _are_equal(state.namespaces, state.attributes):
            self.attributes = copies_of(state.namespaces)
        if not _are_identical(state.registries, state.registered):
            self.registered = list(map(dict.copy, state.registries))
        self.containers, self.contents, self.states = [], [], []
        if state.containers or state.held or state.states:
            self.containers = [(container, container.copy()) for container, _ in state.containers]
            self.contents = [copy_unseen(held.tensor) for held in state.held if held.namespace is None]
            self.states = [module.replay_state() for module, _ in state.states]

    def _write(self) -> None:
        state = self.state
        if self.attributes is not state.attributes:
            for namespace, before in zip(state.namespaces, state.attributes):
                _assign(namespace, before)
        if self.registered is not state.registered:
            for registry, before in zip(state.registries, state.registered):
                _assign(registry, {name: _registered(item, registry.get(name)) for name, item in before.items()})
        for container, before in state.containers:
            _fill(container, before)
        if state.held:
            self._write_held()
        for module, before in state.states:
            module.load_replay_state(before)

    def _write_held(self) -> None:
        for held, content in zip(self.state.held, self.state.fresh_copies()):
            if content is not None and held.namespace is not None:
                held.namespace[held.name] = content
            elif content is not None:
                write_unseen(held.tensor, content)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not self.state.states and self.watch is None:
            self._restore()
            return
        with ExitStack() as stack:
            stack.callback(self._restore)  # last, whatever a module's own `load_replay_state` does
            if self.watch is not None:
                stack.callback(self.watch.__exit__, kind, error, traceback)
            for (module, _), now in zip(self.state.states, self.states):
                stack.callback(module.load_replay_state, now)

    def _restore(self) -> None:
        state = self.state
        if state.held:
            in_place = [held.tensor for held in state.held if held.namespace is None]
            for tensor, content in zip(in_place, self.contents):
                write_unseen(tensor, content)
        if state.containers:
            for container, now in self.containers:
                _fill(container, now)
        if not _are_identical(state.registries, self.registered):
            for registry, now in zip(state.registries, self.registered):
                _assign(registry, now)
        if not _are_equal(state.namespaces, self.attributes):
            for namespace, now in zip(state.namespaces, self.attributes):
                _assign(namespace, now)


class ChangedModules:
    """What modules have become since the forward pass began: where a replay has to bring them if it skips calls.

    It runs inside of a replay's `RewoundModules`, which puts everything back afterwards.
    """

    __slots__ = ("attributes", "containers", "contents", "registered", "state", "states")

    def __init__(self, state: ModuleState) -> None:
        self.state = state
        held = {(id(item.namespace), item.name) for item in state.held}
        self.attributes = [
            {name: value for name, value in now.items() if before.get(name, _NOTHING) is not value}
            for now, before in zip(copies_of(state.namespaces), state.attributes)
        ]
        for namespace, changed in zip(state.namespaces, self.attributes):
            for name in [name for name in changed if (id(namespace), name) in held]:
                changed[name] = copy_unseen(changed[name])
        self.registered = [
            {name: value for name, value in now.items() if before.get(name, _NOTHING) is not value}
            for now, before in zip(state.registries, state.registered)
        ]
        self.contents = [(item, copy_unseen(item.tensor)) for item in _written(state)]
        self.containers = [
            (container, container.copy()) for container, before in state.containers if container != before
        ]
        self.states = [(module, module.replay_state()) for module, _ in state.states]

    def __bool__(self) -> bool:
        return any(self.attributes) or any(self.registered) or bool(self.contents or self.containers or self.states)

    def bring(self) -> None:
        """Make it so."""
        for namespace, changed in zip(self.state.namespaces, self.attributes):
            namespace.update(changed)
        for registry, changed in zip(self.state.registries, self.registered):
            registry.update(changed)
        for held, content in self.contents:
            write_unseen(held.tensor if held.namespace is None else held.namespace[held.name], content)
        for container, content in self.containers:
            _fill(container, content)
        for module, content in self.states:
            module.load_replay_state(content)


def _written(state: ModuleState) -> Iterator[Held]:
    for held, content in zip(state.held, state.copies):
        is_there = held.namespace is None or held.namespace.get(held.name) is held.tensor
        if is_there and not held.tensor.requires_grad:
            is_changed = held.tensor._version != held.version
            if is_changed or (held.is_silent and content is not None and not equal_unseen(held.tensor, content)):
                yield held


def _share_memory(group: list[int], held: list[Held], fresh: list[Tensor | None]) -> None:
    """Let those of `fresh` be views of one memory, as the tensors that they stand for are."""
    storage = held[group[0]].tensor.untyped_storage()
    memory = torch.empty(storage.nbytes(), dtype=torch.uint8, device=storage.device)
    typed = {dtype: memory.view(dtype) for dtype in {held[index].tensor.dtype for index in group}}
    for index in group:
        tensor, content = held[index].tensor, fresh[index]
        assert content is not None
        view = typed[tensor.dtype].as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())
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


def _are_equal(namespaces: Namespaces, copies: Namespaces) -> bool:
    # Comparing dicts compares identities first and runs in C; only an attribute that was assigned to is asked whether
    # it equals the old one, and that may be a tensor or an array, which do not say yes or no.
    try:
        return namespaces == copies
    except Exception:
        return False


def _are_identical(registries: Namespaces, copies: Namespaces) -> bool:
    # By identity: a tensor that is asked whether it equals another computes.
    return (
        list(map(len, registries)) == list(map(len, copies))
        and all(map(is_, _values_of(registries), _values_of(copies)))
        and list(chain.from_iterable(registries)) == list(chain.from_iterable(copies))
    )


def _values_of(registries: Namespaces) -> Iterable[Any]:
    return chain.from_iterable(map(dict.values, registries))


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
